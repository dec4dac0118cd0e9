// What kernels of family sm90 are made of: warpgroup products, copies by tensor maps, and the barriers between them.
//
// Tiles in shared memory are columns of 64 elements, one block of [rows, 64] after the other, in the 128-byte swizzle:
// within eight rows of 128 bytes, 16-byte chunk c of row r lies at chunk c ^ r. Blocks start at multiples of 1024
// bytes. That is what a tensor map with a box of 64 columns writes and what the descriptors here say.
//
// Accumulators of a product of 64 rows by N columns: thread t of a warpgroup holds rows 16 (t / 32) + t % 32 / 4 and
// the same 8 further, columns 8 g + 2 (t % 4) and the next, in d[4 g + 2 half + e]. Packed in pairs, the same registers
// are the A operand of the next product.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

namespace attention_autotuner {

inline constexpr int kSwizzleColumns = 64;  // elements of a row in one block
inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleBytes = 1024;  // of eight rows, after which the pattern repeats
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;
inline constexpr int kProductDepth = 16;  // of one instruction

// Where tiles may start in a CTA's shared memory.
__device__ __forceinline__ uint32_t aligned_shared(void const* smem_bytes) {
  uint32_t const start = uint32_t(__cvta_generic_to_shared(smem_bytes));
  return (start + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
}

// --- barriers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void initialise_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// Makes the phase wait for that many bytes of copies; somebody has yet to arrive.
__device__ __forceinline__ void announce_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives as well.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Arrives once a word has come, and with it what was read from shared memory before: the assembler does not wait for
// loads before it arrives, and the next copy may overtake them.
__device__ __forceinline__ void arrive_after(uint32_t word, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred some;\n"
      "setp.ne.b32 some, %0, 0;\n"
      "@some mbarrier.arrive.shared::cta.b64 _, [%1];\n"
      "@!some mbarrier.arrive.shared::cta.b64 _, [%1];\n"
      "}\n" ::"r"(word),
      "r"(barrier)
      : "memory");
}
// Once all lanes of a warp are there, it arrives. Checkers of races follow the threads that arrive, and not those that
// these waited for, so that builds for them have every lane arrive.
#ifdef ATTENTION_AUTOTUNER_CHECK_RACES
inline constexpr int kWarpArrivals = 32;
#else
inline constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ bool warp_arrives() {
  __syncwarp();
  return kWarpArrivals > 1 || (int(threadIdx.x) & 31) == 0;
}
__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void store_shared_float2(uint32_t address, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}

// --- copies ----------------------------------------------------------------------------------------------------------

// A box of a tensor [batch, heads, rows, columns], on its way into shared memory. What lies outside arrives as zeros.
__device__ __forceinline__ void copy_box(uint32_t target, CUtensorMap const& map, uint32_t barrier, int column, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(CUtensorMap const& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// --- products --------------------------------------------------------------------------------------------------------

// A tile for the tensor cores: `leading` is the distance of blocks of 64 columns where columns are what the product
// does not sum over, else unused.
__device__ __forceinline__ uint64_t describe_tile(uint32_t address, int leading) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(kSwizzleBytes >> 4) << 32 |
         kSwizzle128;
}

// The same tile from some bytes further on.
__device__ __forceinline__ uint64_t advance(uint64_t tile, int bytes) {
  return (tile >> 32) << 32 | (uint32_t(tile) + uint32_t(bytes >> 4));
}

template <typename Element, int N>
struct WarpgroupProduct;
#define ATTENTION_AUTOTUNER_PRODUCT(ELEMENT, NAME, N)                                                           \
  template <>                                                                                                   \
  struct WarpgroupProduct<ELEMENT, N> {                                                                         \
    using Rows = cute::SM90::GMMA::MMA_64x##N##x16_F32##NAME##NAME##_SS<cute::SM90::GMMA::Major::K,             \
                                                                        cute::SM90::GMMA::Major::K>;            \
    using Registers = cute::SM90::GMMA::MMA_64x##N##x16_F32##NAME##NAME##_RS<cute::SM90::GMMA::Major::K,        \
                                                                             cute::SM90::GMMA::Major::MN>;      \
    using RegistersByRows = cute::SM90::GMMA::MMA_64x##N##x16_F32##NAME##NAME##_RS<cute::SM90::GMMA::Major::K,  \
                                                                                   cute::SM90::GMMA::Major::K>; \
  }
ATTENTION_AUTOTUNER_PRODUCT(__half, F16, 64);
ATTENTION_AUTOTUNER_PRODUCT(__half, F16, 128);
ATTENTION_AUTOTUNER_PRODUCT(__half, F16, 192);
ATTENTION_AUTOTUNER_PRODUCT(__half, F16, 256);
ATTENTION_AUTOTUNER_PRODUCT(__nv_bfloat16, BF16, 64);
ATTENTION_AUTOTUNER_PRODUCT(__nv_bfloat16, BF16, 128);
ATTENTION_AUTOTUNER_PRODUCT(__nv_bfloat16, BF16, 192);
ATTENTION_AUTOTUNER_PRODUCT(__nv_bfloat16, BF16, 256);
#undef ATTENTION_AUTOTUNER_PRODUCT

template <typename Element, int Registers, size_t... I>
__device__ __forceinline__ void multiply_tiles(float (&d)[Registers], uint64_t a, uint64_t b, bool adds,
                                               std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  WarpgroupProduct<Element, 2 * Registers>::Rows::fma(a, b, d[I]..., adds ? ScaleOut::One : ScaleOut::Zero);
}
template <typename Element, int Registers, size_t... I>
__device__ __forceinline__ void multiply_registers(float (&d)[Registers], uint32_t const* a, uint64_t b,
                                                   std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  WarpgroupProduct<Element, 2 * Registers>::Registers::fma(a[0], a[1], a[2], a[3], b, d[I]..., ScaleOut::One);
}
template <typename Element, int Registers, size_t... I>
__device__ __forceinline__ void multiply_kept(float (&d)[Registers], uint32_t const* a, uint64_t b, bool adds,
                                              std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  WarpgroupProduct<Element, 2 * Registers>::RegistersByRows::fma(a[0], a[1], a[2], a[3], b, d[I]...,
                                                                 adds ? ScaleOut::One : ScaleOut::Zero);
}
// d (+)= A B^T: both [rows, 16] of tiles whose columns are summed over.
template <typename Element, int Registers>
__device__ __forceinline__ void multiply_tiles(float (&d)[Registers], uint64_t a, uint64_t b, bool adds) {
  multiply_tiles<Element>(d, a, b, adds, std::make_index_sequence<Registers>{});
}
// The same with A in registers.
template <typename Element, int Registers>
__device__ __forceinline__ void multiply_kept(float (&d)[Registers], uint32_t const* a, uint64_t b, bool adds) {
  multiply_kept<Element>(d, a, b, adds, std::make_index_sequence<Registers>{});
}
// d += A B: A in registers, B [16, columns] of a tile whose rows are summed over.
template <typename Element, int Registers>
__device__ __forceinline__ void multiply_registers(float (&d)[Registers], uint32_t const* a, uint64_t b) {
  multiply_registers<Element>(d, a, b, std::make_index_sequence<Registers>{});
}

// Before the first product of a batch: registers written so far are visible to it.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Until at most that many committed batches are under way.
template <int Batches>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Batches) : "memory");
}
// Keeps the compiler from moving reads of what products write to before the wait.
template <int Registers>
__device__ __forceinline__ void products_written(float (&d)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// --- grids in a row --------------------------------------------------------------------------------------------------

// For kernels that are launched to start before the one ahead of them in the stream has ended. The next may start once
// all CTAs have said so or ended; it need not wait, but where it does, all ahead of it is complete and visible.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
__device__ __forceinline__ void wait_for_grids_ahead() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

// --- roles -----------------------------------------------------------------------------------------------------------

template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
// Where a thread of a multiplying warpgroup stands: the first warpgroup of a CTA loads.
__device__ __forceinline__ int group_index() { return int(threadIdx.x) / kWarpgroupThreads - 1; }
__device__ __forceinline__ int group_warp() { return int(threadIdx.x) % kWarpgroupThreads / 32; }
__device__ __forceinline__ int lane_index() { return int(threadIdx.x) & 31; }
// In a tile of 64 rows for each of them: the first of this lane's rows.
__device__ __forceinline__ int group_row() {
  return kWarpgroupRows * group_index() + 16 * group_warp() + lane_index() / 4;
}
// Once all that a warpgroup's products read of a stage has been read.
__device__ __forceinline__ void release(uint32_t freed) {
  if (threadIdx.x % kWarpgroupThreads == 0) arrive(freed);
}
// Multiplying warpgroups issue products in turns, so that one weighs while another multiplies: equally many, the first
// warpgroup first. `begin_turns` comes before the first of them, and `end_turns` after the last.
template <int Groups>
__device__ __forceinline__ void pass_turn() {
  int const next = (group_index() + 1) % Groups;
  asm volatile("bar.arrive %0, %1;\n" ::"r"(1 + next), "n"(2 * kWarpgroupThreads) : "memory");
}
template <int Groups>
__device__ __forceinline__ void begin_turns() {
  if (group_index() == Groups - 1) pass_turn<Groups>();
}
__device__ __forceinline__ void take_turn() {
  asm volatile("bar.sync %0, %1;\n" ::"r"(1 + group_index()), "n"(2 * kWarpgroupThreads) : "memory");
}
__device__ __forceinline__ void end_turns() {
  if (group_index() == 0) take_turn();
}
// Threads of one warpgroup wait for each other.
__device__ __forceinline__ void warpgroup_barrier(int id) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "n"(kWarpgroupThreads) : "memory");
}

}  // namespace attention_autotuner
