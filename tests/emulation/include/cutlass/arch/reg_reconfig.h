// Warpgroups trade registers, of which the emulation has enough.
#pragma once

namespace cutlass::arch {

template <int Registers>
void warpgroup_reg_alloc() {}
template <int Registers>
void warpgroup_reg_dealloc() {}

}  // namespace cutlass::arch
