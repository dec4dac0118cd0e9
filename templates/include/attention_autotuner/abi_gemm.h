/* The params of matrix multiplication, beside abi.h, whose rules they follow. They lie in a header of their own so that
 * the artifacts of other operations do not depend on them.
 */
#ifndef ATTENTION_AUTOTUNER_ABI_GEMM_H_
#define ATTENTION_AUTOTUNER_ABI_GEMM_H_

#include "attention_autotuner/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* C = A B with accumulation in fp32. A matrix is described as it lies in memory: one that is stored column by column,
 * which the artifact is compiled for, as its transpose. Rows start at multiples of 16 bytes. */
typedef struct attention_autotuner_gemm_forward_params {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor a; /* [1, 1, m, k], or [1, 1, k, m] where it is transposed */
  attention_autotuner_tensor b; /* [1, 1, k, n], or [1, 1, n, k] */
  attention_autotuner_tensor o; /* C, [1, 1, m, n] */
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t splits;     /* parts that k is cut into, at most as many as there are steps of 64; 0 or 1: none */
  int32_t row_blocks; /* tiles of rows that are computed side by side, so that they share columns of B in L2; 0: 8 */
} attention_autotuner_gemm_forward_params;

#ifdef __cplusplus
}
#endif

#endif /* ATTENTION_AUTOTUNER_ABI_GEMM_H_ */
