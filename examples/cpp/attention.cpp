// Attention forward and backward from a bundle, in a program without Python, held against the formula on the CPU.
//
//   attention BUNDLE [DIM_QK [DIM_V]]
//
// Ends with 0 if both kernels are right. The bundle comes from `attention-autotuner export --output BUNDLE`.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <attention_autotuner/client.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

namespace at = attention_autotuner;

constexpr int kDevice = 0;
constexpr double kTolerance = 4e-3;  // of the largest value: some roundings of fp16

void require(cudaError_t status, char const* action) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("cannot ") + action + ": " + cudaGetErrorString(status));
}

// Device memory of some elements.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count), data_(nullptr, cudaFree) {
    void* data = nullptr;
    require(cudaMalloc(&data, std::max<size_t>(count, 1) * sizeof(T)), "allocate device memory");
    data_.reset(static_cast<T*>(data));
  }
  explicit DeviceArray(std::vector<T> const& values) : DeviceArray(values.size()) {
    require(cudaMemcpy(data(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
  }
  T* data() const { return data_.get(); }
  std::vector<T> values() const {
    std::vector<T> values(count_);
    require(cudaMemcpy(values.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
    return values;
  }

 private:
  size_t count_;
  std::unique_ptr<T, decltype(&cudaFree)> data_;
};

using Numbers = std::vector<double>;

std::vector<__half> halves(Numbers const& values) {
  std::vector<__half> rounded;
  for (double const value : values) rounded.push_back(__float2half(float(value)));
  return rounded;
}

Numbers numbers(std::vector<__half> const& values) {
  Numbers precise;
  for (__half const value : values) precise.push_back(__half2float(value));
  return precise;
}

// Normal numbers, as fp16 has them.
Numbers draw(size_t count, std::mt19937& random) {
  std::normal_distribution<double> normal;
  Numbers values(count);
  for (double& value : values) value = __half2float(__float2half(float(normal(random))));
  return values;
}

double dot(double const* a, double const* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void add(double* sum, double factor, double const* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += factor * x[i];
}

struct Tensors {
  Numbers q, k, v, dout, o, dq, dk, dv;
};

// The formula, row by row: fills o, dq, dk and dv.
void reference(at::Problem const& p, double scale, Tensors& t) {
  t.o.assign(t.dout.size(), 0), t.dq.assign(t.q.size(), 0), t.dk.assign(t.k.size(), 0), t.dv.assign(t.v.size(), 0);
  for (int64_t row = 0; row < p.batch * p.heads_q * p.seqlen_q; ++row) {
    int64_t const i = row % p.seqlen_q, head = row / p.seqlen_q % p.heads_q, batch = row / p.seqlen_q / p.heads_q;
    int64_t const first = (batch * p.heads_kv + head / (p.heads_q / p.heads_kv)) * p.seqlen_k;
    int64_t const keys = p.causal ? std::clamp<int64_t>(i + p.causal_offset() + 1, 0, p.seqlen_k) : p.seqlen_k;
    double const *q = &t.q[row * p.dim_qk], *dout = &t.dout[row * p.dim_v];
    double* const o = &t.o[row * p.dim_v];
    Numbers probabilities;
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) {  // scores of normal numbers are far from what exp() cannot take
      probabilities.push_back(std::exp(scale * dot(q, &t.k[(first + j) * p.dim_qk], p.dim_qk)));
      sum += probabilities.back();
    }
    for (int64_t j = 0; j < keys; ++j) add(o, probabilities[j] /= sum, &t.v[(first + j) * p.dim_v], p.dim_v);
    double const delta = dot(dout, o, p.dim_v);
    for (int64_t j = 0; j < keys; ++j) {
      double const dp = dot(dout, &t.v[(first + j) * p.dim_v], p.dim_v);
      double const ds = scale * probabilities[j] * (dp - delta);
      add(&t.dq[row * p.dim_qk], ds, &t.k[(first + j) * p.dim_qk], p.dim_qk);
      add(&t.dk[(first + j) * p.dim_qk], ds, q, p.dim_qk);
      add(&t.dv[(first + j) * p.dim_v], probabilities[j], dout, p.dim_v);
    }
  }
}

bool check(char const* name, Numbers const& actual, Numbers const& expected) {
  double largest = 0, error = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    largest = std::max(largest, std::fabs(expected[i]));
    double const off = std::fabs(actual[i] - expected[i]);
    error = std::isnan(off) ? INFINITY : std::max(error, off);
  }
  bool const right = error <= kTolerance * std::max(largest, 1.0);
  std::printf("  %-3s  largest error %.2g of %.2g: %s\n", name, error, largest, right ? "right" : "WRONG");
  return right;
}

// The bundle's kernel for a problem, ready to run here.
at::Kernel serve(at::Bundle const& bundle, at::Problem const& problem) {
  at::Pick const pick = bundle.pick(problem);
  at::Kernel const kernel = bundle.kernel(pick);
  kernel.prepare(kDevice);
  std::printf("%s: %s (%s)\n", problem.describe().c_str(), kernel.info().name.c_str(), at::name_of(pick.layer));
  return kernel;
}

// Launches with a workspace of its own, and waits.
template <typename Params>
void run(at::Kernel const& kernel, Params const& params) {
  DeviceArray<char> const workspace(kernel.workspace_bytes(params));
  cudaStream_t const stream = nullptr;
  kernel.launch(params, workspace.data(), stream, kDevice);
  require(cudaDeviceSynchronize(), "run the kernel");
}

bool forward_and_backward(at::Bundle const& bundle, at::Problem problem) {
  auto const& p = problem;
  size_t const rows_q = size_t(p.batch * p.heads_q * p.seqlen_q), rows_k = size_t(p.batch * p.heads_kv * p.seqlen_k);
  std::mt19937 random(1);
  Tensors t;
  t.q = draw(rows_q * p.dim_qk, random), t.k = draw(rows_k * p.dim_qk, random);
  t.v = draw(rows_k * p.dim_v, random), t.dout = draw(rows_q * p.dim_v, random);
  DeviceArray const q(halves(t.q)), k(halves(t.k)), v(halves(t.v)), dout(halves(t.dout));
  DeviceArray<__half> const o(t.dout.size()), dq(t.q.size()), dk(t.k.size()), dv(t.v.size());
  DeviceArray<float> const lse(rows_q);

  auto const forward = serve(bundle, problem);
  auto inputs = at::make_params<at::AttentionForwardParams>(problem);
  inputs.q = at::contiguous(q.data(), p.heads_q, p.seqlen_q, p.dim_qk);
  inputs.k = at::contiguous(k.data(), p.heads_kv, p.seqlen_k, p.dim_qk);
  inputs.v = at::contiguous(v.data(), p.heads_kv, p.seqlen_k, p.dim_v);
  inputs.o = at::contiguous(o.data(), p.heads_q, p.seqlen_q, p.dim_v);
  inputs.lse = lse.data();
  run(forward, inputs);
  reference(problem, inputs.softmax_scale, t);
  bool right = check("o", numbers(o.values()), t.o);

  problem.direction = at::Direction::kBackward;
  auto const backward = serve(bundle, problem);
  auto gradients = at::make_params<at::AttentionBackwardParams>(problem);
  gradients.q = inputs.q, gradients.k = inputs.k, gradients.v = inputs.v, gradients.o = inputs.o,
  gradients.lse = inputs.lse;
  gradients.dout = at::contiguous(dout.data(), p.heads_q, p.seqlen_q, p.dim_v);
  gradients.dq = at::contiguous(dq.data(), p.heads_q, p.seqlen_q, p.dim_qk);
  gradients.dk = at::contiguous(dk.data(), p.heads_kv, p.seqlen_k, p.dim_qk);
  gradients.dv = at::contiguous(dv.data(), p.heads_kv, p.seqlen_k, p.dim_v);
  run(backward, gradients);
  right = check("dq", numbers(dq.values()), t.dq) && right;
  right = check("dk", numbers(dk.values()), t.dk) && right;
  return check("dv", numbers(dv.values()), t.dv) && right;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2 || count > 4) {
    std::fprintf(stderr, "usage: %s BUNDLE [DIM_QK [DIM_V]]\n", arguments[0]);
    return 2;
  }
  try {
    at::Problem problem;
    problem.batch = 2;
    problem.heads_q = 4;
    problem.heads_kv = 2;
    problem.seqlen_q = problem.seqlen_k = 200;
    problem.dim_qk = count > 2 ? std::atoll(arguments[2]) : 128;
    problem.dim_v = count > 3 ? std::atoll(arguments[3]) : problem.dim_qk;
    problem.causal = true;
    at::Bundle const bundle(arguments[1]);
    require(cudaSetDevice(kDevice), "use the GPU");
    return forward_and_backward(bundle, problem) ? 0 : 1;
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
