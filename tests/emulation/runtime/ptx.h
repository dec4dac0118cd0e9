// Instructions of PTX by name: `mbarrier.init.shared::cta.b64 [%0], %1` is mbarrier_init_shared_cta_b64(%0, %1).
//
// rewrite.py turns inline assembly into calls of these. An instruction that is missing does not compile; add it here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>

#include "machine.h"

namespace emulation {

// Operands by their constraints.
template <typename Value>
uint64_t long_operand(Value value) {
  if constexpr (std::is_pointer_v<Value>) {
    return reinterpret_cast<uint64_t>(value);
  } else {
    return uint64_t(value);
  }
}

namespace ptx {

inline SharedMemory& memory() { return current->cta->memory; }
inline TensorMap const& tensor_at(uint64_t address) { return *reinterpret_cast<TensorMap const*>(address); }

// --- moves and arithmetic --------------------------------------------------------------------------------------------

template <typename To, typename From>
void mov_b32(To& to, From from) {
  to = from;
}
inline void mov_b64(uint64_t& to, uint64_t from) { to = from; }
inline void mov_u32(uint32_t& to, uint32_t from) { to = from; }
inline void setp_ne_b32(bool& to, uint32_t a, uint32_t b) { to = a != b; }
inline void or_b32(uint32_t& to, uint32_t a, uint32_t b) { to = a | b; }
inline void ex2_approx_ftz_f32(float& to, float x) { to = exp2f(x); }
// With an error of up to 2^-11 of the result, as the instruction's.
inline void tanh_approx_f32(float& to, float x) {
  int exponent;
  float const share = std::frexp(tanhf(x), &exponent);
  to = std::ldexp(std::nearbyint(std::ldexp(share, 10)), exponent - 10);
}
inline void lg2_approx_ftz_f32(float& to, float x) { to = log2f(x); }
inline void rcp_approx_ftz_f32(float& to, float x) { to = 1.0f / x; }
inline void cvt_rn_f16x2_f32(uint32_t& to, float high, float low) {
  __half2 const pair = __floats2half2_rn(low, high);
  std::memcpy(&to, &pair, 4);
}
inline void cvt_rn_bf16x2_f32(uint32_t& to, float high, float low) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  std::memcpy(&to, &pair, 4);
}

// --- shared memory ---------------------------------------------------------------------------------------------------

inline void ld_shared_b32(uint32_t& to, uint32_t address) { memory().read(address, &to, 4); }
inline void ld_shared_f32(float& to, uint32_t address) { memory().read(address, &to, 4); }
inline void ld_shared_v2_f32(float& a, float& b, uint32_t address) {
  float values[2];
  memory().read(address, values, 8);
  a = values[0];
  b = values[1];
}
template <typename Word>
void load_four(Word& a, Word& b, Word& c, Word& d, uint32_t address) {
  Word words[4];
  memory().read(address, words, 16);
  a = words[0];
  b = words[1];
  c = words[2];
  d = words[3];
}
inline void ld_shared_v4_b32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  load_four(a, b, c, d, address);
}
inline void ld_shared_v4_f32(float& a, float& b, float& c, float& d, uint32_t address) {
  load_four(a, b, c, d, address);
}
inline void st_shared_b32(uint32_t address, uint32_t word) { memory().write(address, &word, 4); }
inline void st_shared_f32(uint32_t address, float value) { memory().write(address, &value, 4); }
inline void st_shared_v2_f32(uint32_t address, float a, float b) {
  float const values[2] = {a, b};
  memory().write(address, values, 8);
}
inline void st_shared_v4_b32(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t const words[4] = {a, b, c, d};
  memory().write(address, words, 16);
}
inline void st_shared_v4_f32(uint32_t address, float a, float b, float c, float d) {
  float const values[4] = {a, b, c, d};
  memory().write(address, values, 16);
}

// 8x8 matrices of 16-bit elements: lane 8 m + r has the address of row r of matrix m, lane l the elements 2 (l % 4) and
// the next of row l / 4 of each, or, transposed, of that column.
inline uint16_t* matrix_element(uint16_t (*rows)[8], bool transposed, int lane, int e) {
  int const i = lane / 4, j = 2 * (lane % 4) + e;
  return transposed ? &rows[j][i] : &rows[i][j];
}
template <int Matrices, bool Transposed>
void load_matrices(char const* what, uint32_t (&words)[Matrices], uint32_t address) {
  Words* const all = meet(what, ~0u, {{address}}, [](Words* lanes) {
    Words result[32];
    for (int matrix = 0; matrix < Matrices; ++matrix) {
      uint16_t rows[8][8];
      for (int row = 0; row < 8; ++row) memory().read(lanes[8 * matrix + row].w[0], rows[row], 16);
      for (int lane = 0; lane < 32; ++lane) {
        uint32_t const low = *matrix_element(rows, Transposed, lane, 0),
                       high = *matrix_element(rows, Transposed, lane, 1);
        result[lane].w[matrix] = low | high << 16;
      }
    }
    std::memcpy(lanes, result, sizeof(result));
  });
  for (int matrix = 0; matrix < Matrices; ++matrix) words[matrix] = all[current->lane()].w[matrix];
}
template <int Matrices, bool Transposed>
void store_matrices(char const* what, uint32_t address, uint32_t const (&words)[Matrices]) {
  Words mine{{address}};
  for (int matrix = 0; matrix < Matrices; ++matrix) mine.w[1 + matrix] = words[matrix];
  // Each lane writes its row, so that its own fence makes that visible.
  Words* const all = meet(what, ~0u, mine);
  int const lane = current->lane();
  if (lane < 8 * Matrices) {
    uint16_t rows[8][8];
    for (int from = 0; from < 32; ++from) {
      uint32_t const word = all[from].w[1 + lane / 8];
      *matrix_element(rows, Transposed, from, 0) = uint16_t(word);
      *matrix_element(rows, Transposed, from, 1) = uint16_t(word >> 16);
    }
    memory().write(address, rows[lane % 8], 16);
  }
}
#define EMULATION_LDMATRIX(NAME, TRANSPOSED)                                               \
  inline void NAME(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) { \
    uint32_t words[4];                                                                     \
    load_matrices<4, TRANSPOSED>(#NAME, words, address);                                   \
    a = words[0], b = words[1], c = words[2], d = words[3];                                \
  }
EMULATION_LDMATRIX(ldmatrix_sync_aligned_m8n8_x4_shared_b16, false)
EMULATION_LDMATRIX(ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16, true)
#undef EMULATION_LDMATRIX
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(uint32_t& a, uint32_t& b, uint32_t address) {
  uint32_t words[2];
  load_matrices<2, false>("ldmatrix x2", words, address);
  a = words[0], b = words[1];
}
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_matrices<4, false>("stmatrix", address, {a, b, c, d});
}
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                           uint32_t d) {
  store_matrices<4, true>("stmatrix trans", address, {a, b, c, d});
}

// --- barriers --------------------------------------------------------------------------------------------------------

inline void mbarrier_init_shared_cta_b64(uint32_t barrier, uint32_t arrivals) { init_barrier(barrier, int(arrivals)); }
inline void fence_mbarrier_init_release_cluster() {}
inline void mbarrier_expect_tx_relaxed_cta_shared_cta_b64(uint32_t barrier, uint32_t bytes) {
  expect_bytes(barrier, int(bytes));
}
inline void mbarrier_arrive_expect_tx_shared_cta_b64(uint32_t barrier, uint32_t bytes) {
  current->acquired = {};
  expect_bytes(barrier, int(bytes));
  arrive(barrier);
}
inline void mbarrier_arrive_shared_cta_b64(uint32_t barrier) { arrive(barrier); }
// Waits as long as it takes, which the instruction may do.
inline void mbarrier_try_wait_parity_shared_cta_b64(bool& done, uint32_t barrier, uint32_t parity) {
  current->acquired = {};
  wait_parity(barrier, int(parity));
  done = true;
}
inline void bar_sync(uint32_t id, uint32_t threads) { sync_named(int(id), int(threads)); }
inline void bar_arrive(uint32_t id, uint32_t threads) { arrive_named(int(id), int(threads)); }

// --- WGMMA and registers ---------------------------------------------------------------------------------------------

inline void wgmma_fence_sync_aligned() { fence_mma(); }
inline void wgmma_commit_group_sync_aligned() { commit_mma(); }
inline void wgmma_wait_group_sync_aligned(uint32_t pending) { wait_mma(int(pending)); }
inline void setmaxnreg_inc_sync_aligned_u32(uint32_t) {}
inline void setmaxnreg_dec_sync_aligned_u32(uint32_t) {}

// --- TMA -------------------------------------------------------------------------------------------------------------

inline void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t target, uint64_t tensor,
                                                                                     uint32_t a, uint32_t b, uint32_t c,
                                                                                     uint32_t d, uint32_t barrier) {
  load_tensor(target, tensor_at(tensor), barrier, {int(a), int(b), int(c), int(d)});
}
inline void cp_async_bulk_tensor_5d_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t target, uint64_t tensor,
                                                                                     uint32_t a, uint32_t b, uint32_t c,
                                                                                     uint32_t d, uint32_t e,
                                                                                     uint32_t barrier) {
  load_tensor(target, tensor_at(tensor), barrier, {int(a), int(b), int(c), int(d), int(e)});
}
inline void cp_async_bulk_tensor_4d_global_shared_cta_bulk_group(uint64_t tensor, uint32_t a, uint32_t b, uint32_t c,
                                                                 uint32_t d, uint32_t source) {
  store_tensor(tensor_at(tensor), source, {int(a), int(b), int(c), int(d)});
}
inline void cp_async_bulk_commit_group() { commit_stores(); }
inline void cp_async_bulk_wait_group_read(uint32_t pending) { wait_stores(int(pending)); }
inline void cp_async_bulk_wait_group(uint32_t pending) { wait_stores(int(pending)); }
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t target, uint64_t source,
                                                                           uint32_t bytes, uint32_t barrier) {
  load_bytes(target, reinterpret_cast<char const*>(source), bytes, barrier);
}
inline void cp_reduce_async_bulk_global_shared_cta_bulk_group_add_f32(uint64_t target, uint32_t source,
                                                                      uint32_t bytes) {
  reduce_bytes(reinterpret_cast<float*>(target), source, bytes);
}
inline void cp_async_bulk_global_shared_cta_bulk_group(uint64_t target, uint32_t source, uint32_t bytes) {
  store_bytes(reinterpret_cast<float*>(target), source, bytes);
}
inline void fence_proxy_async_global() {}
inline void prefetch_tensormap(uint64_t) {}
inline void cp_async_bulk_prefetch_tensor_4d_L2_global_tile(uint64_t, int, int, int, int) {}
inline void fence_proxy_async_shared_cta() { memory().fence_async(); }

// --- cp.async: copied at the wait for its group
// ------------------------------------------------------------------------

inline void cp_async_cg_shared_global(uint32_t target, uint64_t source, uint32_t bytes, uint32_t existing = 16) {
  if (bytes != 16 || target % 16 != 0) fault("cp.async of %u bytes to %#x", bytes, target);
  memory().will_write(target, current->now(), "cp.async");
  current->copies.push_back({target, existing, reinterpret_cast<void const*>(source)});
}
inline void complete(Copy const& copy) {
  char* const chunk = memory().raw(copy.target, 16, "cp.async");
  std::memset(chunk, 0, 16);
  std::memcpy(chunk, copy.source, copy.existing);
  memory().has_written(copy.target);
}

inline void cp_async_commit_group() {
  current->copy_groups.push_back(std::move(current->copies));
  current->copies.clear();
}
inline void cp_async_wait_group(int pending) {
  auto& groups = current->copy_groups;
  while (groups.size() > size_t(pending)) {
    for (Copy const& copy : groups.front()) complete(copy);
    groups.erase(groups.begin());
  }
}
// For those of no group, too.
inline void cp_async_wait_all() {
  cp_async_commit_group();
  cp_async_wait_group(0);
}

// --- MMAs of a warp: 16 rows by 8 columns over a depth of 16
// -----------------------------------------------------------

inline void multiply_in_warp(float& d0, float& d1, float& d2, float& d3, Words const& operands, float c0, float c1,
                             float c2, float c3, bool bf16) {
  float sums[4] = {c0, c1, c2, c3};
  ::emulation::multiply_in_warp(sums, operands, bf16);
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0,
                                                              uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                              uint32_t b1, float c0, float c1, float c2, float c3) {
  multiply_in_warp(d0, d1, d2, d3, {{a0, a1, a2, a3, b0, b1}}, c0, c1, c2, c3, false);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0,
                                                                uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                                uint32_t b1, float c0, float c1, float c2, float c3) {
  multiply_in_warp(d0, d1, d2, d3, {{a0, a1, a2, a3, b0, b1}}, c0, c1, c2, c3, true);
}

// --- global memory ---------------------------------------------------------------------------------------------------

inline void red_global_add_f32(uint64_t address, float value) { *reinterpret_cast<float*>(address) += value; }
inline void red_global_add_v4_f32(uint64_t address, float a, float b, float c, float d) {
  if (address % 16 != 0) fault("red.global.add.v4.f32 is not aligned");
  float* const target = reinterpret_cast<float*>(address);
  target[0] += a, target[1] += b, target[2] += c, target[3] += d;
}
// A loop over reads of one place waits, once it has read the same twice with no load or wait for a barrier between, for
// a release anywhere.
inline void ld_global_v4_f32(float& a, float& b, float& c, float& d, uint64_t address) {
  float const* const from = reinterpret_cast<float const*>(address);
  a = from[0];
  b = from[1];
  c = from[2];
  d = from[3];
}
inline void ld_acquire_gpu_global_b32(uint32_t& to, uint64_t address) {
  auto const word = [address] { return *reinterpret_cast<uint32_t const*>(address); };
  maybe_yield();
  auto& [place, before] = current->acquired;
  if (place == address) {
    wait_until(releases, [&] { return word() != before; }, "a release of what is %u", before);
  }
  to = word();
  current->acquired = {address, to};
}
inline void st_release_gpu_global_b32(uint64_t address, uint32_t word) {
  maybe_yield();
  *reinterpret_cast<uint32_t*>(address) = word;
  releases.wake();
}
inline void atom_acquire_gpu_global_cas_b32(uint32_t& before, uint64_t address, uint32_t expected, uint32_t word) {
  maybe_yield();
  uint32_t& held = *reinterpret_cast<uint32_t*>(address);
  before = held;
  if (before == expected) held = word;
}
inline void red_release_gpu_global_add_s32(uint64_t address, uint32_t addend) {
  maybe_yield();
  *reinterpret_cast<uint32_t*>(address) += addend;
  releases.wake();
}
inline void fence_acq_rel_gpu() {}
inline void griddepcontrol_launch_dependents() { let_next_begin(); }
inline void griddepcontrol_wait() { wait_for_ahead(); }
inline void nanosleep_u32(uint32_t) {}

// --- clusters --------------------------------------------------------------------------------------------------------

inline void mapa_shared_cluster_u32(uint32_t& to, uint32_t address, uint32_t rank) {
  to = remote_address(address, int(rank));
}
inline void mbarrier_arrive_shared_cluster_b64(uint32_t barrier) { arrive_remotely(barrier); }
inline void mbarrier_arrive_release_cluster_shared_cluster_b64(uint32_t barrier) { arrive_remotely(barrier); }
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_v4_b32(uint32_t target, uint32_t a, uint32_t b,
                                                                      uint32_t c, uint32_t d, uint32_t barrier) {
  store_remotely(target, {a, b, c, d}, barrier);
}
inline void barrier_cluster_arrive() { arrive_in_cluster(); }
inline void barrier_cluster_wait() { wait_in_cluster(); }
inline void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    uint32_t target, uint64_t tensor, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t barrier,
    uint32_t ranks) {
  load_tensor_multicast(target, tensor_at(tensor), barrier, {int(a), int(b), int(c), int(d)}, ranks);
}

}  // namespace ptx
}  // namespace emulation
