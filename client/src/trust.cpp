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

// Calls one of getpwuid_r and getgrgid_r, with a buffer as large as it wants; false where there is no such entry.
template <typename Entry, typename Function>
bool look_up(Function function, uint32_t id, Entry& entry, std::vector<char>& buffer) {
  Entry* entry_or_null = nullptr;
  int status = ERANGE;
  for (size_t bytes = 1 << 12; status == ERANGE && bytes <= size_t(1) << 22; bytes *= 4) {
    buffer.resize(bytes);
    status = function(id, &entry, buffer.data(), buffer.size(), &entry_or_null);
  }
  return status == 0 && entry_or_null != nullptr;
}

// A group of the user's name that is the user's first and has no other members: who has a umask of 002 has one.
bool is_private(gid_t gid, uid_t uid) {
  std::vector<char> user_buffer, group_buffer;
  passwd user{};
  group of_file{};
  if (!look_up(getpwuid_r, uid, user, user_buffer) || !look_up(getgrgid_r, gid, of_file, group_buffer)) return false;
  std::string const name = user.pw_name;
  if (user.pw_gid != gid || name != of_file.gr_name) return false;
  for (char** member = of_file.gr_mem; *member != nullptr; ++member) {
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
  if (stat(path.c_str(), &status) != 0) return;  // the reader says why it cannot be read
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
