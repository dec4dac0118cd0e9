// WGMMA as CUTLASS names it, over the emulated machine.
#pragma once

#include <cstdint>
#include <tuple>

namespace cute {

inline void warpgroup_arrive() { ::emulation::fence_mma(); }
inline void warpgroup_commit_batch() { ::emulation::commit_mma(); }
template <int Pending>
void warpgroup_wait() {
  ::emulation::wait_mma(Pending);
}
template <typename Register>
void warpgroup_fence_operand(Register&) {}

namespace SM90::GMMA {

enum class Major { K, MN };
enum class ScaleOut { Zero, One };

// The last argument is the scale, the ones before it are the accumulators, which lie one after the other.
template <int Columns, bool Bf16, Major A, Major B>
struct EmulatedSS {
  template <typename... Rest>
  static void fma(uint64_t a, uint64_t b, float& first, Rest&&... rest) {
    ScaleOut const scale = std::get<sizeof...(Rest) - 1>(std::forward_as_tuple(rest...));
    static_assert(sizeof...(Rest) == Columns / 2);
    ::emulation::issue_mma({Columns, Bf16, false, A == Major::MN, B == Major::MN}, &first, a, nullptr, b,
                           scale == ScaleOut::One);
  }
};
template <int Columns, bool Bf16, Major B>
struct EmulatedRS {
  template <typename... Rest>
  static void fma(uint32_t const& a0, uint32_t const& a1, uint32_t const& a2, uint32_t const& a3, uint64_t b,
                  float& first, Rest&&... rest) {
    ScaleOut const scale = std::get<sizeof...(Rest) - 1>(std::forward_as_tuple(rest...));
    static_assert(sizeof...(Rest) == Columns / 2);
    uint32_t const* const a[4] = {&a0, &a1, &a2, &a3};
    ::emulation::issue_mma({Columns, Bf16, true, false, B == Major::MN}, &first, 0, a, b, scale == ScaleOut::One);
  }
};
#define EMULATION_ATOMS(N)                                          \
  template <Major A, Major B>                                       \
  using MMA_64x##N##x16_F32F16F16_SS = EmulatedSS<N, false, A, B>;  \
  template <Major A, Major B>                                       \
  using MMA_64x##N##x16_F32BF16BF16_SS = EmulatedSS<N, true, A, B>; \
  template <Major A, Major B>                                       \
  using MMA_64x##N##x16_F32F16F16_RS = EmulatedRS<N, false, B>;     \
  template <Major A, Major B>                                       \
  using MMA_64x##N##x16_F32BF16BF16_RS = EmulatedRS<N, true, B>
EMULATION_ATOMS(64);
EMULATION_ATOMS(128);
EMULATION_ATOMS(192);
EMULATION_ATOMS(256);
#undef EMULATION_ATOMS

}  // namespace SM90::GMMA
}  // namespace cute
