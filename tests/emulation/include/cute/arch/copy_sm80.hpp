// Groups of cp.async as CUTLASS names them.
#pragma once

namespace cute {

inline void cp_async_fence() {
  ::emulation::current->copy_groups.push_back(std::move(::emulation::current->copies));
  ::emulation::current->copies.clear();
}
// For all copies where none may be pending, also those of no group yet.
template <int Pending>
void cp_async_wait() {
  if constexpr (Pending == 0) cp_async_fence();
  auto& groups = ::emulation::current->copy_groups;
  while (groups.size() > Pending) {
    for (auto const& copy : groups.front()) ::emulation::ptx::complete(copy);
    groups.erase(groups.begin());
  }
}

}  // namespace cute
