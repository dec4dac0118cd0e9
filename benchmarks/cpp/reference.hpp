// What kernels are held against: rows of their outputs by the formulas, on the CPU in fp64, and the same with every
// step rounded as the formula in the input type would, which is the error that a kernel is excused.
//
// Gradients of attention are functions of q, k, v, dout and of the o and LSE that the kernel is handed, so that a row
// costs one pass over a sequence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention_autotuner/client.hpp"
#include "numbers.hpp"

namespace attention_autotuner::benchmarks {

// A tensor [batch, heads, rows, columns], copied to the host.
struct HostTensor {
  Number type = Number::kFp32;
  int64_t heads = 1, rows = 1, columns = 1;
  std::vector<std::byte> bytes;

  int64_t count() const { return int64_t(bytes.size() / bytes_of(type)); }
  double value(int64_t index) const;
  // The numbers of a row.
  std::vector<double> row(int64_t batch, int64_t head, int64_t index) const;
};

// What a launch read; tensors that the operation has not are empty.
struct HostInputs {
  HostTensor q, k, v, o, dout, lse, log2_gamma, initial_state;
};

// Which row of an output.
struct Position {
  int64_t batch, head, row;
};

struct Row {
  std::vector<double> exact, low;
};

// One row of an output (o, lse, final_state, dq, dk or dv) of a problem, by its name in the ABI.
Row row_of(std::string const& output, Problem const& problem, double scale, HostInputs const& inputs,
           Position const& position);

// The first and the last row of an output and others of a seed, no more than it has.
std::vector<Position> sample(HostTensor const& output, int64_t batch, int count, uint64_t seed);

// The result of comparing one output.
struct Check {
  std::string output;
  std::string reason;  // why it is wrong; empty when it is right
  int64_t rows = 0;    // compared
  double max_error = 0, max_allowed = 0, norm_error = 0, norm_allowed = 0;
};

// Holds rows of an output against the formula: max|out - exact| <= 2 max|low - exact| + eps, and the norm of the error
// at most 1.5 times that of low plus eps sqrt(n), with eps two units in the last place at max|exact|. Every element of
// the output, of those rows or not, must be finite (LSE: or minus infinity where the exact value is).
Check compare(std::string const& name, HostTensor const& output, Problem const& problem, double scale,
              HostInputs const& inputs, int samples, uint64_t seed);

}  // namespace attention_autotuner::benchmarks
