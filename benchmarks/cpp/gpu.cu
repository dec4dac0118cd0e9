#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <mma.h>

#include <chrono>

#include "gpu.hpp"

namespace attention_autotuner::benchmarks {
namespace {

void require(cudaError_t status, char const* action) {
  if (status == cudaSuccess) return;
  throw GpuError(std::string("cannot ") + action + ": " + cudaGetErrorString(status));
}

std::string dotted(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

template <typename T>
__device__ T converted(float value);
template <>
__device__ float converted(float value) {
  return value;
}
template <>
__device__ __half converted(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 converted(float value) {
  return __float2bfloat16_rn(value);
}
__device__ float widened(__half value) { return __half2float(value); }
__device__ float widened(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__global__ void fill_normal_kernel(T* to, size_t count, uint64_t seed) {
  size_t const step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = converted<T>(normal(seed, i));
  }
}

__global__ void spin_kernel(int64_t cycles) {
  int64_t const begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

constexpr int kWarmUpWarps = 8;
constexpr int kWarmUpTiles = 2;  // of each operand: four independent sums, so that the tensor cores never wait

// Products of random tiles, all of each operand with all of the other. The sums are written so that they are computed.
__global__ void warm_up_kernel(float* sink, int steps) {
  using namespace nvcuda;
  __shared__ __half tiles[2 * kWarmUpTiles][16 * 16];
  for (int i = threadIdx.x; i < 2 * kWarmUpTiles * 256; i += blockDim.x) {
    tiles[i / 256][i % 256] = __float2half_rn(normal(1, i));
  }
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> a[kWarmUpTiles];
  wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::row_major> b[kWarmUpTiles];
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[kWarmUpTiles][kWarmUpTiles];
  for (int t = 0; t < kWarmUpTiles; ++t) {
    wmma::load_matrix_sync(a[t], tiles[t], 16);
    wmma::load_matrix_sync(b[t], tiles[kWarmUpTiles + t], 16);
    for (auto& sum : sums[t]) wmma::fill_fragment(sum, 0.0f);
  }
  for (int i = 0; i < steps; ++i) {
#pragma unroll
    for (int t = 0; t < kWarmUpTiles * kWarmUpTiles; ++t) {
      auto& sum = sums[t / kWarmUpTiles][t % kWarmUpTiles];
      wmma::mma_sync(sum, a[t / kWarmUpTiles], b[t % kWarmUpTiles], sum);
    }
  }
  float total = 0;
  for (auto const& line : sums) {
    for (auto const& sum : line) {
      for (float const value : sum.x) total += value;
    }
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

constexpr int kWarmUpSteps = 20000;  // a few milliseconds

int warm_up_blocks() {
  int device = 0, multiprocessors = 0;
  require(cudaGetDevice(&device), "ask for the device");
  require(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "count multiprocessors");
  return 2 * multiprocessors;
}

size_t warm_up_bytes() { return sizeof(float) * size_t(warm_up_blocks()) * 32 * kWarmUpWarps; }

void launch_warm_up(float* sink) {
  warm_up_kernel<<<warm_up_blocks(), 32 * kWarmUpWarps>>>(sink, kWarmUpSteps);
  require(cudaGetLastError(), "warm the GPU up");
}

// The product of two square matrices in fp16 by cuBLAS, where the machine has it: it heats as Python's warm-up does, so
// that kernels meet the same clocks. Taken at run time by its C interface, as nothing else here needs it.
class Blas {
 public:
  Blas() {
    for (std::string const name :
         {"libcublas.so." + std::to_string(CUDART_VERSION / 1000), std::string("libcublas.so")}) {
      if (library_ == nullptr) library_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (library_ == nullptr) return;
    auto const create = reinterpret_cast<int (*)(void**)>(dlsym(library_, "cublasCreate_v2"));
    multiply_ = reinterpret_cast<Multiply>(dlsym(library_, "cublasGemmEx"));
    if (create == nullptr || multiply_ == nullptr || create(&handle_) != 0) return;
    for (auto* matrix : {&a_, &c_}) *matrix = std::make_unique<Memory>(sizeof(__half) * kSize * kSize);
    fill_normal(a_->data(), size_t(kSize) * kSize, Number::kFp16, 0);
  }

  // Enqueues one product; false where there is no cuBLAS.
  bool multiply() {
    if (c_ == nullptr) return false;
    constexpr int kNoTranspose = 0, kComputeFp32 = 68, kAnyAlgorithm = -1;  // of cublas_api.h
    float const unit = 1, zero = 0;
    return multiply_(handle_, kNoTranspose, kNoTranspose, kSize, kSize, kSize, &unit, a_->data(), CUDA_R_16F, kSize,
                     a_->data(), CUDA_R_16F, kSize, &zero, c_->data(), CUDA_R_16F, kSize, kComputeFp32,
                     kAnyAlgorithm) == 0;
  }

 private:
  static constexpr int kSize = 4096;
  using Multiply = int (*)(void* handle, int, int, int m, int n, int k, void const* alpha, void const* a, cudaDataType,
                           int lda, void const* b, cudaDataType, int ldb, void const* beta, void* c, cudaDataType,
                           int ldc, int compute, int algorithm);
  void* library_ = nullptr;
  void* handle_ = nullptr;
  Multiply multiply_ = nullptr;
  std::unique_ptr<Memory> a_, c_;
};

constexpr int kRows = 32, kKeys = 32, kColumns = 128;       // of a CTA: rows, keys of a step, columns of V
constexpr int kMaxDim = 256, kPad = 2;                      // of Q and K in shared memory, elements
constexpr int kThreads = 256, kSharing = kThreads / kRows;  // neighbouring threads that share a row

// One CTA: 32 rows of a head and 128 columns of its output, keys step by step with a running maximum, all in fp32.
template <typename T>
__global__ void attention_by_formula_kernel(AttentionForwardParams p) {
  __shared__ T q[kRows][kMaxDim + kPad], k[kKeys][kMaxDim + kPad], v[kKeys][kColumns];
  __shared__ float probabilities[kRows][kKeys + 1];
  int const slices = (p.dim_v + kColumns - 1) / kColumns;
  int const head = blockIdx.y, batch = blockIdx.z / slices, first_column = blockIdx.z % slices * kColumns;
  int const first_row = blockIdx.x * kRows, kv = head / (p.heads_q / p.heads_kv);
  int const line = threadIdx.x / kSharing, lane = threadIdx.x % kSharing, row = first_row + line;
  auto const at = [=](attention_autotuner_tensor const& t, int h, int i) {
    return static_cast<T*>(t.data) + batch * t.stride_batch + h * t.stride_head + i * t.stride_row;
  };
  for (int i = threadIdx.x; i < kRows * p.dim_qk; i += kThreads) {
    int const r = i / p.dim_qk, d = i % p.dim_qk;
    q[r][d] = first_row + r < p.seqlen_q ? at(p.q, head, first_row + r)[d] : converted<T>(0.0f);
  }
  int64_t const diagonal = int64_t(row) + p.causal_offset;
  int64_t const furthest = int64_t(first_row) + kRows - 1 + p.causal_offset;
  int const end = p.causal && furthest + 1 < p.seqlen_k ? int(furthest + 1) : p.seqlen_k;
  float maximum = -INFINITY, sum = 0, o[kColumns / kSharing] = {};
  for (int begin = 0; begin < end; begin += kKeys) {
    __syncthreads();
    for (int i = threadIdx.x; i < kKeys * p.dim_qk; i += kThreads) {
      int const j = i / p.dim_qk, d = i % p.dim_qk;
      k[j][d] = begin + j < p.seqlen_k ? at(p.k, kv, begin + j)[d] : converted<T>(0.0f);
    }
    for (int i = threadIdx.x; i < kKeys * kColumns; i += kThreads) {
      int const j = i / kColumns, e = first_column + i % kColumns;
      v[j][i % kColumns] = begin + j < p.seqlen_k && e < p.dim_v ? at(p.v, kv, begin + j)[e] : converted<T>(0.0f);
    }
    __syncthreads();
    float scores[kKeys / kSharing], largest = maximum;
#pragma unroll
    for (int c = 0; c < kKeys / kSharing; ++c) {
      int const j = lane + c * kSharing;
      float score = 0;
      for (int d = 0; d < p.dim_qk; ++d) score = fmaf(widened(q[line][d]), widened(k[j][d]), score);
      bool const seen = begin + j < p.seqlen_k && (!p.causal || begin + j <= diagonal);
      scores[c] = seen ? score * p.softmax_scale : -INFINITY;
      largest = fmaxf(largest, scores[c]);
    }
    for (int apart = kSharing / 2; apart > 0; apart /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    }
    float const factor = largest == -INFINITY ? 1.0f : expf(maximum - largest);
    maximum = largest;
    float share = 0;
#pragma unroll
    for (int c = 0; c < kKeys / kSharing; ++c) {
      float const probability = largest == -INFINITY ? 0.0f : expf(scores[c] - largest);
      probabilities[line][lane + c * kSharing] = probability;
      share += probability;
    }
    for (int apart = kSharing / 2; apart > 0; apart /= 2) share += __shfl_xor_sync(0xffffffffu, share, apart);
    sum = sum * factor + share;
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kColumns / kSharing; ++c) o[c] *= factor;
    for (int j = 0; j < kKeys; ++j) {
      float const probability = probabilities[line][j];
#pragma unroll
      for (int c = 0; c < kColumns / kSharing; ++c) o[c] = fmaf(probability, widened(v[j][lane + c * kSharing]), o[c]);
    }
  }
  if (row >= p.seqlen_q) return;
  T* const out = at(p.o, head, row);
#pragma unroll
  for (int c = 0; c < kColumns / kSharing; ++c) {
    int const e = first_column + lane + c * kSharing;
    if (e < p.dim_v) out[e] = converted<T>(sum > 0 ? o[c] / sum : 0.0f);
  }
  if (lane == 0 && first_column == 0) {
    p.lse[(int64_t(batch) * p.heads_q + head) * p.seqlen_q + row] = sum > 0 ? maximum + logf(sum) : -INFINITY;
  }
}

}  // namespace

DeviceProperties select_device(int index) {
  int count = 0;
  require(cudaGetDeviceCount(&count), "count the GPUs");
  if (index < 0 || index >= count) {
    throw GpuError("there is no device " + std::to_string(index) + ": this machine has " + std::to_string(count));
  }
  require(cudaSetDevice(index), "select the device");
  cudaDeviceProp device;
  require(cudaGetDeviceProperties(&device, index), "describe the device");
  int driver = 0, runtime = 0;
  require(cudaDriverGetVersion(&driver), "ask for the driver's CUDA version");
  require(cudaRuntimeGetVersion(&runtime), "ask for the runtime's CUDA version");
  char bus[32];
  require(cudaDeviceGetPCIBusId(bus, sizeof(bus), index), "ask for the device's bus");
  DeviceProperties properties;
  properties.name = device.name;
  properties.compute_capability = std::to_string(device.major) + "." + std::to_string(device.minor);
  properties.pci_bus_id = bus;
  properties.cuda_driver = dotted(driver);
  properties.cuda_runtime = dotted(runtime);
  properties.num_sms = device.multiProcessorCount;
  properties.l2_bytes = size_t(device.l2CacheSize);
  return properties;
}

size_t free_memory() {
  size_t free = 0, total = 0;
  require(cudaMemGetInfo(&free, &total), "ask for free memory");
  return free;
}

void synchronize() { require(cudaDeviceSynchronize(), "finish the work on the GPU"); }

Memory::Memory(size_t bytes)
    : bytes_(bytes), data_(nullptr, [](std::byte* held) { static_cast<void>(cudaFree(held)); }) {
  void* data = nullptr;
  require(cudaMalloc(&data, bytes == 0 ? 1 : bytes), ("allocate " + std::to_string(bytes) + " bytes").c_str());
  data_.reset(static_cast<std::byte*>(data));
}

void upload(void* to, void const* from, size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the GPU");
}

void download(void* to, void const* from, size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the GPU");
}

void fill_bytes(void* to, int byte, size_t bytes) { require(cudaMemset(to, byte, bytes), "fill memory"); }

void fill_normal(void* to, size_t count, Number type, uint64_t seed) {
  constexpr int kBlocks = 1024, kBlockThreads = 256;
  if (type == Number::kFp16) {
    fill_normal_kernel<<<kBlocks, kBlockThreads>>>(static_cast<__half*>(to), count, seed);
  } else if (type == Number::kBf16) {
    fill_normal_kernel<<<kBlocks, kBlockThreads>>>(static_cast<__nv_bfloat16*>(to), count, seed);
  } else {
    fill_normal_kernel<<<kBlocks, kBlockThreads>>>(static_cast<float*>(to), count, seed);
  }
  require(cudaGetLastError(), "make inputs");
}

Stream::Stream() : handle_(nullptr, [](void* held) { static_cast<void>(cudaStreamDestroy(cudaStream_t(held))); }) {
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
  handle_.reset(stream);
}

Stream::Stream(void* handle) : handle_(handle, [](void*) {}) {}
Stream Stream::standard() { return Stream(nullptr); }

Event::Event() : handle_(nullptr, [](void* held) { static_cast<void>(cudaEventDestroy(cudaEvent_t(held))); }) {
  cudaEvent_t event = nullptr;
  require(cudaEventCreate(&event), "make an event");
  handle_.reset(event);
}

void Event::record(Stream const& stream) {
  require(cudaEventRecord(cudaEvent_t(handle_.get()), cudaStream_t(stream.handle())), "record an event");
}

void Event::record_in_graph(Stream const& captured) {
  require(
      cudaEventRecordWithFlags(cudaEvent_t(handle_.get()), cudaStream_t(captured.handle()), cudaEventRecordExternal),
      "record an event in a graph");
}

double Event::microseconds_since(Event const& earlier) const {
  float milliseconds = 0;
  require(cudaEventElapsedTime(&milliseconds, cudaEvent_t(earlier.handle_.get()), cudaEvent_t(handle_.get())),
          "read a time");
  return milliseconds * 1e3;
}

Graph::Graph(std::function<void(Stream const&)> const& work)
    : handle_(nullptr, [](void* held) { static_cast<void>(cudaGraphExecDestroy(cudaGraphExec_t(held))); }) {
  Stream const stream;  // the standard one cannot be captured
  auto const on = cudaStream_t(stream.handle());
  require(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal), "begin a graph");
  cudaGraph_t graph = nullptr;
  try {
    work(stream);
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(on, &graph));
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    throw;
  }
  require(cudaStreamEndCapture(on, &graph), "end a graph");
  cudaGraphExec_t ready = nullptr;
  cudaError_t const status =
      cudaGraphInstantiate(&ready, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch);  // as torch does
  static_cast<void>(cudaGraphDestroy(graph));
  require(status, "make a graph");
  handle_.reset(ready);
}

void Graph::replay(Stream const& stream) const {
  require(cudaGraphLaunch(cudaGraphExec_t(handle_.get()), cudaStream_t(stream.handle())), "launch a graph");
}

void spin(Stream const& stream, int64_t cycles) {
  spin_kernel<<<1, 1, 0, cudaStream_t(stream.handle())>>>(cycles);
  require(cudaGetLastError(), "launch the spinning kernel");
}

std::string warm_up(double seconds) {
  static Blas blas;  // loading it takes longer than warming up
  bool const by_blas = blas.multiply();
  Memory const sink(by_blas ? 0 : warm_up_bytes());
  using Clock = std::chrono::steady_clock;
  auto const end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    for (int i = 0; by_blas && i < 20; ++i) blas.multiply();
    if (!by_blas) launch_warm_up(reinterpret_cast<float*>(sink.data()));
    synchronize();
  }
  return by_blas ? "cublas" : "wmma";
}

void attention_by_formula(AttentionForwardParams const& p, Number type) {
  if (p.dim_qk > kMaxDim) throw GpuError("dim_qk is beyond " + std::to_string(kMaxDim));
  int const slices = (p.dim_v + kColumns - 1) / kColumns;
  dim3 const grid((p.seqlen_q + kRows - 1) / kRows, p.heads_q, p.batch * slices);
  if (type == Number::kFp16) {
    attention_by_formula_kernel<__half><<<grid, kThreads>>>(p);
  } else {
    attention_by_formula_kernel<__nv_bfloat16><<<grid, kThreads>>>(p);
  }
  require(cudaGetLastError(), "compute attention by its formula");
}

}  // namespace attention_autotuner::benchmarks
