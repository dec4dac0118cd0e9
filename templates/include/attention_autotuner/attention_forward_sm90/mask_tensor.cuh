// Tensors of masks in attention's forward of family sm90: bytes that hide keys, or numbers that are added to scores.
//
// Scores stand in the order of WGMMA's accumulators: of eight keys, a lane has two. Where rows of the mask are
// contiguous and aligned, a lane reads all eight of a row at once while MMAs compute the scores, and four lanes
// exchange what they have read; elsewhere every lane reads what it needs, element by element.
#pragma once

#include <cstdint>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_forward {

// Part of the arguments of kernels with such a mask, and nothing of others.
template <bool kAttnMask>
struct MaskTensorArguments {};
template <>
struct MaskTensorArguments<true> {
  attention_autotuner_tensor attn_mask;
  int64_t mask_stride_column;
  int mask_kind;   // see abi.h
  bool in_blocks;  // eight keys of a row are contiguous and aligned, for all multiples of eight below seqlen_k
};

inline constexpr int kMaskOfBytes = 0, kMaskOfFloats = 1, kMaskOfHalves = 2;
inline constexpr int kKeysOfBlock = 8;

template <typename Params>
inline void take_mask(MaskTensorArguments<true>& arguments, Params const& p) {
  attention_autotuner_tensor const& mask = arguments.attn_mask = p.attn_mask;
  arguments.mask_stride_column = p.attn_mask_stride_column;
  arguments.mask_kind = p.attn_mask_kind;
  uintptr_t const block_bytes = kKeysOfBlock * (p.attn_mask_kind == kMaskOfBytes ? 1 : 2);
  arguments.in_blocks = p.attn_mask_kind != kMaskOfFloats && p.attn_mask_stride_column == 1 &&
                        p.seqlen_k % kKeysOfBlock == 0 && mask.stride_row % kKeysOfBlock == 0 &&
                        mask.stride_head % kKeysOfBlock == 0 && mask.stride_batch % kKeysOfBlock == 0 &&
                        reinterpret_cast<uintptr_t>(mask.data) % block_bytes == 0;
}

// What a lane reads of the mask for its two rows of a tile of scores.
template <typename T, bool kAny = T::kAttnMask>
struct MaskOfTile {};
template <typename T>
struct MaskOfTile<T, true> {
  static constexpr int kBlocks = T::kBlockN / kKeysOfBlock, kFetches = divide_up(kBlocks, 4);
  // Whether there are registers for a tile of the mask beside what MMAs are at work on.
  static constexpr bool kAhead =
      T::kFragmentRegisters + T::kBlockN / 4 + T::kRegistersBesideFragments + (T::kOverlaps ? 8 : 0) <=
      T::kConsumerRegisters;

  static constexpr int kElementsAtOnce = 8;

  char const* row[2];              // of the mask, at the first key of a range
  uint32_t words[2][kFetches][4];  // of blocks 4 i + the lane's place among four

  template <typename Arguments>
  __device__ __forceinline__ void begin_row(Arguments const& arguments, int half, int batch, int head, int query,
                                            int key) {
    auto const& mask = arguments.attn_mask;
    int64_t const place = batch * mask.stride_batch + head * mask.stride_head +
                          minimum(query, arguments.seqlen_q - 1) * mask.stride_row + key * arguments.mask_stride_column;
    int const bytes = arguments.mask_kind == kMaskOfBytes ? 1 : arguments.mask_kind == kMaskOfFloats ? 4 : 2;
    row[half] = static_cast<char const*>(mask.data) + place * bytes;
  }
  template <typename Arguments>
  __device__ __forceinline__ static bool in_blocks(Arguments const& arguments) {
    return !T::kKeyBounds && arguments.in_blocks;
  }

  // Begins to read what a tile needs whose first key is `column`, of `keys` in all.
  template <typename Arguments>
  __device__ __forceinline__ void fetch(Arguments const& arguments, int column, int keys) {
    if (!kAhead || !in_blocks(arguments)) return;
#pragma unroll
    for (int i = 0; i < kFetches; ++i) read(arguments, i, column, keys);
  }
  // Hides scores of the tile or adds to them. `scale`: of what is added.
  template <typename Arguments, int Registers>
  __device__ __forceinline__ void apply(Arguments const& arguments, float (&s)[Registers], int column, int keys,
                                        float scale) {
    if (!in_blocks(arguments)) return apply_elements(arguments, s, column, keys, scale);
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      if constexpr (!kAhead) read(arguments, i, column, keys);
      if (arguments.mask_kind == kMaskOfBytes) {
        hide_keys(s, i);
      } else if (arguments.mask_kind == kMaskOfHalves) {
        add<__half>(s, i, scale);
      } else {
        add<__nv_bfloat16>(s, i, scale);
      }
      if constexpr (!kAhead) keep_in_order();
    }
  }

 private:
  // Of the tile's blocks, four at a time.
  template <typename Arguments>
  __device__ __forceinline__ void read(Arguments const& arguments, int i, int column, int keys) {
    int const block = 4 * i + (lane_index() & 3), key = column + kKeysOfBlock * block;
    bool const inside = block < kBlocks && key < keys;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto& read = words[half][i];
      if (arguments.mask_kind == kMaskOfBytes) {
        uint2 const bytes = inside ? *reinterpret_cast<uint2 const*>(row[half] + key) : uint2{};
        read[0] = bytes.x;
        read[1] = bytes.y;
      } else {
        uint4 const halves = inside ? *reinterpret_cast<uint4 const*>(row[half] + 2 * int64_t(key)) : uint4{};
        read[0] = halves.x;
        read[1] = halves.y;
        read[2] = halves.z;
        read[3] = halves.w;
      }
    }
  }
  // Loads after this are not issued before it, or all of a tile's would want registers at a time.
  __device__ __forceinline__ static void keep_in_order() { asm volatile("" ::: "memory"); }
  // The words of four lanes as a matrix, transposed: word k is what lane k had for this one.
  __device__ __forceinline__ static void exchange(uint32_t (&words)[4]) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      bool const upper = lane_index() & step;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & step) continue;
        uint32_t const other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + step], step);
        words[i] = upper ? other : words[i];
        words[i + step] = upper ? words[i + step] : other;
      }
    }
  }
  template <typename Number, int Registers>
  __device__ __forceinline__ void add(float (&s)[Registers], int i, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exchange(words[half][i]);
#pragma unroll
      for (int k = 0; k < 4 && 4 * i + k < kBlocks; ++k) {
        float2 const pair = unpack_pair<Number>(words[half][i][k]);
        int const at = 4 * (4 * i + k) + 2 * half;
        s[at] = fmaf(pair.x, scale, s[at]);
        s[at + 1] = fmaf(pair.y, scale, s[at + 1]);
      }
    }
  }
  // A bit for each of four bytes that is not 0.
  __device__ __forceinline__ static uint32_t bits_of(uint32_t bytes) {
    bytes |= bytes >> 4;
    bytes |= bytes >> 2;
    bytes |= bytes >> 1;
    return (bytes & 0x01010101u) * 0x01020408u >> 24 & 0xfu;
  }
  template <int Registers>
  __device__ __forceinline__ void hide_keys(float (&s)[Registers], int i) const {
    constexpr int kBits = kKeysOfBlock;  // of a block of each half
    uint32_t seen = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      seen |= (bits_of(words[half][i][0]) | bits_of(words[half][i][1]) << 4) << kBits * half;
    }
#pragma unroll
    for (int k = 0; k < 4 && 4 * i + k < kBlocks; ++k) {
      uint32_t const here = __shfl_sync(0xffffffffu, seen, k, 4) >> 2 * (lane_index() & 3);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = s[4 * (4 * i + k) + e];
        score = here & 1u << (kBits * (e / 2) + e % 2) ? score : minus_infinity();
      }
    }
  }
  template <typename Arguments, int Registers>
  __device__ __forceinline__ void apply_elements(Arguments const& arguments, float (&s)[Registers], int column,
                                                 int keys, float scale) const {
    if (arguments.mask_kind == kMaskOfBytes) {
      over_elements<char>(arguments, column, keys, [&s](int i, char seen) { s[i] = seen ? s[i] : minus_infinity(); });
    } else if (arguments.mask_kind == kMaskOfFloats) {
      over_elements<float>(arguments, column, keys, [&](int i, float x) { s[i] = fmaf(x, scale, s[i]); });
    } else if (arguments.mask_kind == kMaskOfHalves) {
      over_elements<__half>(arguments, column, keys, [&](int i, __half x) { s[i] = fmaf(float(x), scale, s[i]); });
    } else {
      over_elements<__nv_bfloat16>(arguments, column, keys,
                                   [&](int i, __nv_bfloat16 x) { s[i] = fmaf(float(x), scale, s[i]); });
    }
  }
  // Keys behind the last one, which are masked after this, take the last one's.
  template <typename Element, typename Arguments, typename Take>
  __device__ __forceinline__ void over_elements(Arguments const& arguments, int column, int keys, Take&& take) const {
    if (keys <= 0) return;
    int const first = column + 2 * (lane_index() & 3);
#pragma unroll
    for (int i = 0; i < T::kBlockN / 2; ++i) {
      int const key = minimum(first + 8 * (i / 4) + i % 2, keys - 1);
      take(i, reinterpret_cast<Element const*>(row[i / 2 % 2])[key * arguments.mask_stride_column]);
      if (i % kElementsAtOnce == kElementsAtOnce - 1) keep_in_order();
    }
  }
};

}  // namespace attention_autotuner::softmax_forward
