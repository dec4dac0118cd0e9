// SHA-256 of a file: what the index of a bundle says of every library.
#pragma once

#include <string>

namespace attention_autotuner {

// 64 hexadecimal characters; throws BundleError where the file cannot be read.
std::string file_sha256(std::string const& path);

}  // namespace attention_autotuner
