#include "sha256.hpp"

#include <array>
#include <cstdint>
#include <fstream>
#include <vector>

#include "attention_autotuner/client.hpp"

namespace attention_autotuner {
namespace {

constexpr size_t kBlock = 64;

// FIPS 180-4: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

void add_block(std::array<uint32_t, 8>& state, unsigned char const* bytes) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t(bytes[4 * i]) << 24 | uint32_t(bytes[4 * i + 1]) << 16 | uint32_t(bytes[4 * i + 2]) << 8 |
           bytes[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    uint32_t const a = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
    uint32_t const b = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < 64; ++i) {
    uint32_t const t1 = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    uint32_t const t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  uint32_t const sums[] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += sums[i];
}

}  // namespace

std::string file_sha256(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::vector<char> buffer(kBlock << 14);
  uint64_t length = 0;
  std::vector<unsigned char> rest;
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) || file.gcount() > 0) {
    auto const* bytes = reinterpret_cast<unsigned char const*>(buffer.data());
    auto const count = static_cast<size_t>(file.gcount());
    length += count;
    size_t const whole = count / kBlock * kBlock;  // only the last read ends within a block
    for (size_t at = 0; at < whole; at += kBlock) add_block(state, bytes + at);
    rest.assign(bytes + whole, bytes + count);
  }
  if (!file.eof()) throw BundleError("cannot read " + path);
  rest.push_back(0x80);
  while (rest.size() % kBlock != kBlock - 8) rest.push_back(0);
  for (int i = 7; i >= 0; --i) rest.push_back(static_cast<unsigned char>(length * 8 >> 8 * i));
  for (size_t at = 0; at < rest.size(); at += kBlock) add_block(state, rest.data() + at);
  std::string hex;
  for (uint32_t const word : state) {
    for (int i = 7; i >= 0; --i) hex.push_back("0123456789abcdef"[word >> 4 * i & 15]);
  }
  return hex;
}

}  // namespace attention_autotuner
