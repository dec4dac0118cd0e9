// One kernel with all that a launch of it needs: sets of inputs, outputs between guards, and a workspace.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gpu.hpp"
#include "reference.hpp"

namespace attention_autotuner::benchmarks {

// What is wrong with a kernel beside its numbers, e.g. that it wrote beside its outputs.
class WrongError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Case {
 public:
  virtual ~Case() = default;
  // Enqueues the work on one of the sets.
  virtual void launch(int set, Stream const& stream) = 0;
  // Runs on the first set, with outputs and workspace full of NaN, and holds `samples` rows of every output against the
  // formula. Throws WrongError where it writes beside them, or is not deterministic and should be.
  virtual std::vector<Check> verify(Stream const& stream, int samples, uint64_t seed) = 0;
  virtual int sets() const = 0;
  virtual size_t workspace_bytes() const = 0;
};

// Makes the inputs of a problem, as the Python measurer has them: normal numbers, usual decays, no states except for
// steps of decoding, and, for gradients of attention, the o and LSE of the formula.
std::unique_ptr<Case> make_case(Problem const& problem, Kernel const& kernel, int device, int sets, uint64_t seed);

}  // namespace attention_autotuner::benchmarks
