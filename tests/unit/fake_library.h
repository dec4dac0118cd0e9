/* What kernel libraries that run on the host share: everything of the C ABI but the work. The file that includes this
 * names its PARAMS and defines attention_autotuner_workspace_bytes() and run(). */
#include "attention_autotuner/abi.h"

typedef struct PARAMS Params;

#ifndef NAME
#define NAME "fake"
#endif

static int launch_count;
static void* last_stream;
static void* last_workspace;

ATTENTION_AUTOTUNER_EXPORT int32_t fake_launch_count(void) { return launch_count; }
ATTENTION_AUTOTUNER_EXPORT void* fake_last_stream(void) { return last_stream; }
ATTENTION_AUTOTUNER_EXPORT void* fake_last_workspace(void) { return last_workspace; }

static void run(Params const* p, float* workspace);

uint32_t attention_autotuner_abi_version(void) { return ATTENTION_AUTOTUNER_ABI_VERSION; }

int32_t attention_autotuner_get_kernel_info(attention_autotuner_kernel_info* info) {
  *info = (attention_autotuner_kernel_info){
      sizeof(*info), ATTENTION_AUTOTUNER_ABI_VERSION, NAME, 64, 48, 128, 32, 256, 1024, 49152, 16};
  return ATTENTION_AUTOTUNER_OK;
}

int32_t attention_autotuner_prepare(int32_t device) {
  (void)device;
  return ATTENTION_AUTOTUNER_OK;
}

const char* attention_autotuner_status_string(int32_t status) {
  return status == ATTENTION_AUTOTUNER_BAD_VERSION ? "a bad version" : "some other status";
}

int32_t attention_autotuner_launch(const void* params, void* workspace, void* stream, int32_t device) {
  Params const* p = params;
  (void)device;
  last_stream = stream;
  last_workspace = workspace;
  ++launch_count;
  if (p->struct_size != sizeof(*p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
  run(p, workspace);
  return ATTENTION_AUTOTUNER_OK;
}

static _Float16* row(attention_autotuner_tensor t, int64_t batch, int64_t head, int64_t index) {
  return (_Float16*)t.data + batch * t.stride_batch + head * t.stride_head + index * t.stride_row;
}

static float dot(_Float16 const* a, _Float16 const* b, int n) {
  float sum = 0;
  for (int d = 0; d < n; ++d) sum += (float)a[d] * (float)b[d];
  return sum;
}

static void add(float* sum, float factor, _Float16 const* x, int n) {
  for (int d = 0; d < n; ++d) sum[d] += factor * (float)x[d];
}

static void store(_Float16* out, float const* sum, int n) {
  for (int d = 0; d < n; ++d) out[d] = (_Float16)sum[d];
}
