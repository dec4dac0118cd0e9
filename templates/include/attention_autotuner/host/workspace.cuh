// The layout of a workspace.
#pragma once

#include <cstdint>

namespace attention_autotuner {

// Hands out buffers of a workspace, each at a multiple of 256 bytes; without a workspace it only counts.
class WorkspaceLayout {
 public:
  explicit WorkspaceLayout(void* base) : base_(static_cast<char*>(base)) {}
  // A buffer of `count` elements, or null where it is not wanted.
  template <typename Type>
  Type* take(bool wanted, int64_t count) {
    if (!wanted) return nullptr;
    Type* const part = reinterpret_cast<Type*>(base_ + used_);
    used_ += (count * int64_t(sizeof(Type)) + 255) / 256 * 256;
    return part;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace attention_autotuner
