// The body of the benchmarks of kernels: for each problem find the kernel, check it, time it, report it.
#pragma once

#include <vector>

#include "attention_autotuner/client.hpp"

namespace attention_autotuner::benchmarks {

// Answers with the program's exit status: 0, 1 where a kernel is missing, fails or is wrong, 2 for bad options.
int run_benchmark(int count, char const* const* arguments, char const* program, Op op,
                  std::vector<Direction> const& directions);

}  // namespace attention_autotuner::benchmarks
