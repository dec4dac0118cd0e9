// Whose files are loaded: the twin of core/trust.py.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace attention_autotuner {

// Throws BundleError, naming path, owner and mode, where a file or folder belongs neither to this user nor to root nor
// to one of these owners, or where others can write to it. Of a link the target and its folder are looked at. What
// does not exist passes.
void check_trusted(std::filesystem::path const& path, std::vector<uint32_t> const& owners);

}  // namespace attention_autotuner
