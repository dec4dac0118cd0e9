#include "benchmark.hpp"

int main(int count, char** arguments) {
  using namespace attention_autotuner;
  return benchmarks::run_benchmark(count, arguments, "bench_retention", Op::kRetention,
                                   {Direction::kForward, Direction::kBackward});
}
