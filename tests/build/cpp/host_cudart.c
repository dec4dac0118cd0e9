/* The few calls of the CUDA runtime that examples/cpp makes, on the host's memory: loaded before the real runtime. */
#include <stdlib.h>
#include <string.h>

int cudaSetDevice(int device) { return device == 0 ? 0 : 101; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaMalloc(void** data, size_t bytes) {
  *data = malloc(bytes);
  memset(*data, 0xFF, bytes);
  return 0;
}
int cudaFree(void* data) {
  free(data);
  return 0;
}
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  (void)kind;
  memcpy(to, from, bytes);
  return 0;
}
