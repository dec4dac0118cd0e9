// Strided tensors of the C ABI as kernels read them.
#pragma once

#include "attention_autotuner/abi.h"

namespace attention_autotuner {

// Where a head's rows start.
template <typename Element>
__device__ __forceinline__ Element const* head_data(attention_autotuner_tensor const& tensor, int batch, int head) {
  return static_cast<Element const*>(tensor.data) + batch * tensor.stride_batch + head * tensor.stride_head;
}

}  // namespace attention_autotuner
