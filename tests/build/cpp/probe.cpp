// What the tests ask of the client beside its own command: one answer a line for each line of standard input.
//
//   json <text>        the value's kind, or the error
//   bucket <problem>   bucketed and rounded sequence lengths, classes, causal offset, flops, bytes and description
//   round <value>      rounded to fp16 and to bf16
//   params <problem>   sizes, where the diagonal hangs, and scale of its params
//   workspace <bundle> <problem>   of the bundle's pick for attention forward, bytes
//   stats <values>     median and spread
//   sets <bytes moved> <bytes of L2> <bytes free>   sets of inputs, cold and warm
//   launches <time of one, us> <sets>   launches that one graph holds
//   place <bytes ...>  segment and offset in it of each piece that a pool gives
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "attention_autotuner/client.hpp"
#include "json.hpp"
#include "measure.hpp"
#include "numbers.hpp"
#include "pool.hpp"

namespace at = attention_autotuner;

namespace {

void show(at::json::Value const& value) {
  using Kind = at::json::Value::Kind;
  switch (value.kind()) {
    case Kind::kNull:
      std::printf("null");
      break;
    case Kind::kBoolean:
      std::printf(value.boolean() ? "true" : "false");
      break;
    case Kind::kNumber:
      std::printf("%.17g", value.number());
      break;
    case Kind::kString:
      std::printf("\"");
      for (char const c : value.string()) std::printf("%02x", static_cast<unsigned char>(c));
      std::printf("\"");
      break;
    case Kind::kArray:
      std::printf("[");
      for (auto const& item : value.array()) show(item), std::printf(",");
      std::printf("]");
      break;
    case Kind::kObject:
      std::printf("{");
      for (auto const& [name, item] : value.members()) std::printf("%s:", name.c_str()), show(item), std::printf(",");
      std::printf("}");
  }
}

void bucket(at::Problem const& problem) {
  at::Problem const bucketed = problem.bucketed();
  at::Problem const rounded = problem.rounded();
  std::printf("%lld %lld %lld %lld %lld %lld %lld %.17g %.17g %s", static_cast<long long>(bucketed.seqlen_q),
              static_cast<long long>(bucketed.seqlen_k), static_cast<long long>(rounded.seqlen_q),
              static_cast<long long>(rounded.seqlen_k), static_cast<long long>(problem.padded_dim_qk()),
              static_cast<long long>(problem.padded_dim_v()), static_cast<long long>(problem.causal_offset()),
              problem.flops(), problem.bytes_moved(), problem.describe().c_str());
}

std::vector<double> values_of(std::string const& text) {
  std::istringstream stream(text);
  std::vector<double> values;
  for (double value; stream >> value;) values.push_back(value);
  return values;
}

void place(std::vector<double> const& sizes) {
  at::benchmarks::Pool pool;
  std::map<size_t, std::byte*> begins;
  for (double const size : sizes) {
    at::benchmarks::Block const block = pool.take(size_t(size));
    begins.emplace(block.segment, block.data);  // its first piece is where it begins
    std::printf("%zu:%zu ", block.segment, size_t(block.data - begins.at(block.segment)));
  }
}

void answer(std::string const& command, std::string const& text) {
  using namespace at::benchmarks;
  if (command == "json") {
    show(at::json::parse(text));
  } else if (command == "bucket") {
    bucket(at::Problem::from_json(text));
  } else if (command == "round") {
    double const value = std::stod(text);
    std::printf("%.17g %.17g", rounded(value, Number::kFp16), rounded(value, Number::kBf16));
  } else if (command == "stats") {
    std::vector<double> const values = values_of(text);
    std::printf("%.17g %.17g", median_of(values), spread_of(values));
  } else if (command == "sets") {
    std::vector<double> const v = values_of(text);
    auto const sets = [&v](bool cold) { return count_sets(v.at(0), size_t(v.at(1)), size_t(v.at(2)), cold); };
    std::printf("%d %d", sets(true), sets(false));
  } else if (command == "launches") {
    std::vector<double> const v = values_of(text);
    std::printf("%d", launches_per_replay(v.at(0), int(v.at(1))));
  } else if (command == "place") {
    place(values_of(text));
  } else if (command == "workspace") {
    size_t const end = text.find(' ');
    at::Bundle const bundle(text.substr(0, end));
    at::Problem const problem = at::Problem::from_json(text.substr(end + 1));
    auto const params = at::make_params<at::AttentionForwardParams>(problem);
    std::printf("%zu", bundle.kernel(bundle.pick(problem)).workspace_bytes(params));
  } else {
    at::Problem const problem = at::Problem::from_json(text);
    auto const params = at::make_params<at::AttentionForwardParams>(problem);
    std::printf("%u %u %d %d %d %d %.9g", params.struct_size, params.abi_version, params.seqlen_q, params.causal,
                params.causal_offset, params.causal_from_end, double(params.softmax_scale));
  }
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    size_t const space = line.find(' ');
    try {
      answer(line.substr(0, space), line.substr(space + 1));
    } catch (std::exception const& error) {
      std::printf("error: %s", error.what());
    }
    std::printf("\n");
  }
  return 0;
}
