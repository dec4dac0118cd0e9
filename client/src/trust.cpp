#include "trust.hpp"

#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>

#include "attention_autotuner/client.hpp"

namespace attention_autotuner {
namespace {

// Calls one of getpwuid_r and getgrgid_r, with as much room as it wants; false where there is no such entry.
template <typename Entry, typename Function>
bool look_up(Function function, uint32_t id, Entry& entry, std::vector<char>& room) {
  Entry* found = nullptr;
  int status = ERANGE;
  for (size_t bytes = 1 << 12; status == ERANGE && bytes <= size_t(1) << 22; bytes *= 4) {
    room.resize(bytes);
    status = function(id, &entry, room.data(), room.size(), &found);
  }
  return status == 0 && found != nullptr;
}

// A group of the user's name that is the user's first and has no other members: who has a umask of 002 has one.
bool is_private(gid_t gid, uid_t uid) {
  std::vector<char> user_room, group_room;
  passwd user{};
  group own{};
  if (!look_up(getpwuid_r, uid, user, user_room) || !look_up(getgrgid_r, gid, own, group_room)) return false;
  std::string const name = user.pw_name;
  if (user.pw_gid != gid || name != own.gr_name) return false;
  for (char** member = own.gr_mem; *member != nullptr; ++member) {
    if (name != *member) return false;
  }
  return true;
}

bool is_shared(struct stat const& status) {
  if (S_ISDIR(status.st_mode) && (status.st_mode & S_ISVTX) != 0) return false;  // names can be added, not replaced
  if ((status.st_mode & S_IWOTH) != 0) return true;
  return (status.st_mode & S_IWGRP) != 0 && !is_private(status.st_gid, status.st_uid);
}

}  // namespace

void check_trusted(std::filesystem::path const& path, std::vector<uint32_t> const& owners) {
  struct stat status{};
  std::error_code unknown;
  if (std::filesystem::is_symlink(path, unknown)) {
    auto const target = std::filesystem::canonical(path, unknown);
    if (!unknown) check_trusted(target.parent_path(), owners);
  }
  if (stat(path.c_str(), &status) != 0) return;  // whoever reads it says why it cannot be read
  bool const known = status.st_uid == 0 || status.st_uid == geteuid() ||
                     std::find(owners.begin(), owners.end(), uint32_t(status.st_uid)) != owners.end();
  if (known && !is_shared(status)) return;
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", unsigned(status.st_mode & 07777));
  throw BundleError(path.string() + " is not used: it belongs to user " + std::to_string(status.st_uid) +
                    " and has mode " + mode + ": " +
                    (known ? "others can write to it; see what is in it, then run `chmod -R go-w` on it"
                           : "another user, whose code would run with your rights; name that user in "
                             "Bundle::Options::trusted_owners, or make the bundle your own"));
}

}  // namespace attention_autotuner
