// What a tensor of masks adds to some of a lane's scores, for accumulators of common/warp_mma.cuh.
//
// Of a patch all loads are on their way together, and beside other work where it loads them early; what kind of mask it
// is matters once a patch. Family sm90's passes read masks by ways of their own.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

// Element e of column tile j in line l: of row `row` + 8 l and column `column` + 8 j + e of scores, or of their
// transpose, where `kKeysAreRows`. Nothing is added for kernels without a mask.
template <typename Modifications, int kLines, int kColumns, bool kKeysAreRows = false,
          bool kAny = Modifications::template kHas<AttnMask>>
struct MaskPatch {
  __device__ __forceinline__ void load(Modifications const&, int, int) {}
  __device__ __forceinline__ void take(Modifications const&) {}
  __device__ __forceinline__ void read(Modifications const&, int, int) {}
  __device__ __forceinline__ static float apply(float score, int, int, int) { return score; }
};
template <typename Modifications, int kLines, int kColumns, bool kKeysAreRows>
struct MaskPatch<Modifications, kLines, kColumns, kKeysAreRows, true> {
  uint32_t bits[kLines][kColumns][2];  // as they lie in memory; of pairs the first alone
  float values[kLines][kColumns][2];   // in powers of two
  bool pairs;                          // two keys were read at a time

  // Begins to read. Nobody wants what becomes of scores that do not exist.
  __device__ __forceinline__ void load(AttnMask const& mask, int row, int column) {
    pairs = !kKeysAreRows && mask.in_pairs && column % 2 == 0;
    if (mask.kind == 0) {
      pairs ? load_words<uint16_t, 1>(mask, row, column) : load_words<uint8_t, 2>(mask, row, column);
    } else if (pairs) {
      load_words<uint32_t, 1>(mask, row, column);
    } else if (mask.kind == 1) {
      load_words<uint32_t, 2>(mask, row, column);
    } else {
      load_words<uint16_t, 2>(mask, row, column);
    }
  }
  // Makes numbers of what has been read.
  __device__ __forceinline__ void take(AttnMask const& mask) {
    if (mask.kind == 0) {
      over_elements([this](uint32_t const(&word)[2], int e) {
        uint32_t const pair = pairs ? word[0] : word[0] | word[1] << 8;
        return pair & 0xffu << 8 * e ? 0.0f : minus_infinity();
      });
    } else if (mask.kind == 1) {
      over_elements([](uint32_t const(&word)[2], int e) { return __uint_as_float(word[e]); });
    } else {
      auto pair = [this](uint32_t const(&word)[2]) { return pairs ? word[0] : word[0] | word[1] << 16; };
      if (mask.kind == 2) {
        over_elements([&](uint32_t const(&word)[2], int e) { return element<__half>(pair(word), e); });
      } else {
        over_elements([&](uint32_t const(&word)[2], int e) { return element<__nv_bfloat16>(pair(word), e); });
      }
    }
  }
  __device__ __forceinline__ void read(AttnMask const& mask, int row, int column) {
    load(mask, row, column);
    take(mask);
  }
  __device__ __forceinline__ float apply(float score, int line, int j, int e) const {
    return score + values[line][j][e];
  }

 private:
  template <typename Word, int kWords>
  __device__ __forceinline__ void load_words(AttnMask const& mask, int row, int column) {
    auto const* const words = reinterpret_cast<Word const*>(mask.data);
    int64_t const of_rows = kKeysAreRows ? mask.stride_column : mask.stride_row;
    int64_t const of_columns = kKeysAreRows ? mask.stride_row : mask.stride_column;
    uint32_t const rows = kKeysAreRows ? mask.columns : mask.rows, columns = kKeysAreRows ? mask.rows : mask.columns;
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
      bool const exists = uint32_t(row + 8 * l) < rows;
      int64_t const first = (row + 8 * l) * of_rows + column * of_columns;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < kWords; ++e) {
          int const place = 8 * j + e;
          // Strides are of elements, of which a pair is two, side by side.
          int64_t const at = kWords == 1 ? first / 2 + place / 2 : first + place * of_columns;
          bits[l][j][e] = exists && uint32_t(column + place) < columns ? words[at] : Word(0);
        }
      }
    }
  }
  template <typename Number>
  __device__ __forceinline__ static float element(uint32_t pair, int e) {
    float2 const both = unpack_pair<Number>(pair);
    return e == 0 ? both.x : both.y;
  }
  template <typename Value>
  __device__ __forceinline__ void over_elements(Value&& value) {
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) values[l][j][e] = kLog2E * value(bits[l][j], e);
      }
    }
  }
};

}  // namespace attention_autotuner
