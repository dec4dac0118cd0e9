// The command lines of the benchmarks.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_autotuner/client.hpp"

namespace attention_autotuner::benchmarks {

// A flag is unknown, or its value is no good; programs then end with status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Flags with a value, or without one (then given an empty value name), in the order of --help.
class CommandLine {
 public:
  explicit CommandLine(std::string purpose) : purpose_(std::move(purpose)) {}
  void flag(std::string name, std::string value_name, std::string help,
            std::function<void(std::string const&)> const& take);
  // Applies what is given. True where --help was asked for, which is then printed. Throws UsageError.
  bool parse(int count, char const* const* arguments, char const* program) const;

 private:
  struct Flag {
    std::string name, value_name, help;
    std::function<void(std::string const&)> take;
  };
  std::string purpose_;
  std::vector<Flag> flags_;
};

// The one of some enumerators that is named so; throws UsageError with the flag's name.
template <typename Enum>
Enum one_of(std::string const& flag, std::string const& text, std::vector<Enum> const& values) {
  std::string known;
  for (Enum const value : values) {
    if (text == name_of(value)) return value;
    known += (known.empty() ? "" : ", ") + std::string(name_of(value));
  }
  throw UsageError(flag + " must be one of " + known + ", got \"" + text + "\"");
}

// A whole positive number, or one from 0 on; throws UsageError with the flag's name.
int64_t positive(std::string const& flag, std::string const& text);
int64_t not_negative(std::string const& flag, std::string const& text);
// A number from 0 to a maximum; throws UsageError with the flag's name.
double at_most(std::string const& flag, std::string const& text, double maximum);

// Runs a program's body: prints what it throws and answers with the status, 2 for UsageError, 1 for others.
int run_program(char const* name, std::function<int()> const& body);

// What all benchmarks of kernels are told.
struct Options {
  std::string bundle, library;  // one of the two
  bool every_pick = false;
  std::vector<Problem> problems;
  int device = 0;
  int rounds = 10;
  double rest = 0;  // idle time after a round, over the round's
  bool cold = true;
  int samples = 64;  // rows of each output that are held against the formula; 0 for none
  uint64_t seed = 0;
  std::string json, csv;
};

// Reads the options of a benchmark of an operation; `directions` are those that it can be asked for, its default first.
// True where --help was asked for and printed.
bool parse_options(int count, char const* const* arguments, char const* program, Op op,
                   std::vector<Direction> const& directions, Options& options);

}  // namespace attention_autotuner::benchmarks
