// The thread that takes a CTA's shares of dQ from shared memory to their fp32 sums in global memory.
//
// The first share of a tile of queries to come is stored and the others are added, so that no kernel clears the sums
// before. CTAs visit tiles in the same order. One claims a tile when its share of the tile before has left, and lets
// others add to it once its own is in global memory, before it waits for any of them: so no wait is for ever.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/dq_share.cuh"
#include "attention_autotuner/attention_backward_sm90/memory.cuh"
#include "attention_autotuner/attention_backward_sm90/producer.cuh"

namespace attention_autotuner::softmax_backward {

inline constexpr int kDqSender = 96, kOtherDqSender = 64;  // of the producer's warpgroup
inline constexpr int kStoredOnce = 2;                      // of a semaphore, after a claim

// A warpgroup's part of a share, as few copies as are contiguous.
template <typename T>
__device__ __forceinline__ void send_dq_part(float* sums, uint32_t stage, int part, bool first) {
  // Where parts are columns of rows of queries, 16 rows at a time.
  constexpr bool kInterleaved = T::kSplitsDqColumns && !T::kSwapsDq;
  constexpr int kCopies = kInterleaved ? 4 : 1;
  constexpr int kPartBytes = T::kDqTileBytes / T::kDqParts, kStride = T::kDqTileBytes / 4;
  constexpr int kBefore = 64 * 64;  // bytes of 64 columns of 16 rows
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    int const from = kInterleaved ? i * kStride + part * kBefore : part * kPartBytes;
    int const bytes = !kInterleaved ? kPartBytes : part == 0 ? kBefore : kStride - kBefore;
    bulk_copy(sums + from / 4, stage + from, bytes, first);
  }
  bulk_commit();
}

// Once all parts of a share, the latest copies of this thread, have been read from the one stage.
template <typename T>
__device__ __forceinline__ void release_dq_stage(BackwardPassSm90Stages<T> const& stages, int stage) {
  using Sent = SentDq<T>;
  if constexpr (T::kDqParts > 1) {
    tma_store_wait_read<1>();
    arrive(Sent::empty(stages, stage, 0));
  }
  tma_store_wait_read();
  arrive(Sent::empty(stages, stage, T::kDqParts - 1));
}

// Shares in the order of their blocks of keys, so that equal inputs give equal bits. Two threads take turns, so that a
// share may leave while the one before is on its way.
template <typename T>
__device__ __forceinline__ void queue_dq_shares(BackwardPassSm90Stages<T> const& stages) {
  using Sent = SentDq<T>;
  if (stages.steps() == 0) return;
  stages.wait_for_preprocess();
  int const turn = threadIdx.x == kDqSender ? 0 : 1;
  QueryOrder<T> const order(stages);
  Cursor now = stages.range.begin();
#pragma unroll 1
  for (int index = stages.begin; index < stages.end; ++index, stages.range.next(now)) {
    if (index % T::kDqSenders != turn) continue;
    int const slot = Sent::Ring::stage(index);
    Cursor const at = order.at(now);
    int64_t const tile = dq_tile_index<T>(stages, at);
    int* const semaphore = stages.arguments.semaphores + tile;
    int const before = order.shares_before(stages, at.tile);
    if (before > 0) {
      semaphore_wait(semaphore, before);
      fence_bulk_copies();
    }
#pragma unroll
    for (int part = 0; part < T::kDqParts; ++part) {
      wait(Sent::full(stages, slot, part), Sent::Ring::phase(index));
      send_dq_part<T>(dq_tile<T>(stages.arguments, tile), Sent::tile(stages, index), part, before == 0);
    }
    release_dq_stage<T>(stages, slot);
    bulk_wait_written<0>();
    semaphore_release(semaphore, before + 1);
  }
}

// Shares as they come: who claims a tile first stores its own.
template <typename T>
__device__ __forceinline__ void send_dq_shares(BackwardPassSm90Stages<T> const& stages) {
  using Sent = SentDq<T>;
  if (stages.steps() == 0) return;
  stages.wait_for_preprocess();
  int* const semaphores = stages.arguments.semaphores;
  Cursor now = stages.range.begin();
  int tile = int(dq_tile_index<T>(stages, now));
  int stored = -1;  // the tile whose first share is on its way
  int state = semaphore_claim(semaphores + tile);
  auto const release = [&] {
    semaphore_release(semaphores + stored, kStoredOnce);
    stored = -1;
  };
#pragma unroll 1
  for (int index = stages.begin; index < stages.end; ++index) {
    bool const first = state == 0;
    if (!first) {
      if (state != kStoredOnce) {
        if (stored >= 0) {
          bulk_wait_written<0>();
          release();
        }
        semaphore_wait(semaphores + tile, kStoredOnce);
      }
      fence_bulk_copies();
    }
    int const stage = Sent::Ring::stage(index);
    float* const sums = dq_tile<T>(stages.arguments, tile);
#pragma unroll
    for (int part = 0; part < T::kDqParts; ++part) {
      wait(Sent::full(stages, stage, part), Sent::Ring::phase(index));
      send_dq_part<T>(sums, Sent::tile(stages, index), part, first);
    }
    int const sent = tile;
    stages.range.next(now);
    if (index + 1 < stages.end) {
      tile = int(dq_tile_index<T>(stages, now));
      state = semaphore_claim(semaphores + tile);
    }
    if constexpr (T::kDqStages > 1) {
      tma_store_wait_read<1>();
      if (index > stages.begin) arrive(Sent::empty(stages, stage ^ 1, 0));
    } else {
      release_dq_stage<T>(stages, 0);
    }
    if (stored >= 0) {
      bulk_wait_written<T::kDqParts>();
      release();
    }
    if (first) stored = sent;
  }
  if constexpr (T::kDqStages > 1) {
    tma_store_wait_read();
    arrive(Sent::empty(stages, Sent::Ring::stage(stages.end - 1), 0));
  }
  if (stored >= 0) {
    bulk_wait_written<0>();
    release();
  }
}

}  // namespace attention_autotuner::softmax_backward
