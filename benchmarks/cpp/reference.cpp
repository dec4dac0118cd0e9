#include "reference.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <random>
#include <set>
#include <thread>
#include <tuple>

namespace attention_autotuner::benchmarks {
namespace {

constexpr double kMaxFactor = 2.0, kNormFactor = 1.5, kUlps = 2.0;
// Kernels of retention sum chunk by chunk over states that are rounded for products, too; the formula row by row, as it
// is here, rounds about 0.7 times as much in norm and half as much at its worst.
constexpr double kRetentionFactor = 2.0;

double dot(std::vector<double> const& a, std::vector<double> const& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void add(std::vector<double>& sum, double factor, std::vector<double> const& row) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += factor * row[i];
}

// Sums of a row, exact and as the input type would have them.
struct Sums {
  Row row;
  Number type;

  Sums(int64_t columns, Number type)
      : row{std::vector<double>(size_t(columns)), std::vector<double>(size_t(columns))}, type(type) {}
  void add_row(double exact, double low, std::vector<double> const& values) {
    add(row.exact, exact, values);
    add(row.low, low, values);
  }
  Row finish(double scale_low = 1.0) {
    for (double& value : row.low) value = rounded(value * scale_low, type);
    return row;
  }
};

// One problem with its inputs, and a head of it.
struct View {
  Problem const& p;
  double scale;
  HostInputs const& in;

  Number type() const { return in.q.type; }
  double low(double value) const { return rounded(value, type()); }
  int64_t group() const { return p.heads_q / p.heads_kv; }
  bool sees(int64_t row, int64_t key) const { return !p.causal || key <= row + p.causal_offset(); }
  double log2_gamma(int64_t head) const { return in.log2_gamma.value(head); }
};

// Scores of one row of Q with every key that it sees: exact, and rounded.
struct Scores {
  std::vector<double> exact, low;
};

Scores scores_of(View const& view, Position const& at, std::vector<double> const& q) {
  Scores scores;
  for (int64_t j = 0; j < view.p.seqlen_k && view.sees(at.row, j); ++j) {
    double const product = dot(q, view.in.k.row(at.batch, at.head / view.group(), j));
    scores.exact.push_back(product * view.scale);
    scores.low.push_back(view.low(view.low(product) * view.scale));
  }
  return scores;
}

double log_sum(std::vector<double> const& scores) {
  if (scores.empty()) return -std::numeric_limits<double>::infinity();
  double const largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double const score : scores) sum += std::exp(score - largest);
  return largest + std::log(sum);
}

Row attention_output(View const& view, Position const& at, bool lse) {
  Scores const scores = scores_of(view, at, view.in.q.row(at.batch, at.head, at.row));
  double const exact = log_sum(scores.exact), low = log_sum(scores.low);
  if (lse) return {{exact}, {low}};
  Sums o(view.p.dim_v, view.type());
  for (size_t j = 0; j < scores.exact.size(); ++j) {
    o.add_row(std::exp(scores.exact[j] - exact), view.low(std::exp(scores.low[j] - low)),
              view.in.v.row(at.batch, at.head / view.group(), int64_t(j)));
  }
  return o.finish();
}

// The weight of a pair of a row and a key, and its gradient over the scale; exact and rounded.
struct Pair {
  double p, p_low, ds, ds_low;
};

struct QueryRow {
  std::vector<double> q, dout;
  double lse, delta;
};

QueryRow query_row(View const& view, Position const& at) {
  QueryRow row;
  row.q = view.in.q.row(at.batch, at.head, at.row);
  row.dout = view.in.dout.row(at.batch, at.head, at.row);
  row.lse = view.in.lse.row(at.batch, at.head, at.row)[0];
  row.delta = dot(row.dout, view.in.o.row(at.batch, at.head, at.row));
  return row;
}

Pair pair_of(View const& view, QueryRow const& row, std::vector<double> const& k, std::vector<double> const& v) {
  if (row.lse == -std::numeric_limits<double>::infinity()) return {0, 0, 0, 0};
  double const product = dot(row.q, k), dp = dot(row.dout, v);
  Pair pair;
  pair.p = std::exp(product * view.scale - row.lse);
  pair.p_low = view.low(std::exp(view.low(view.low(product) * view.scale) - row.lse));
  pair.ds = pair.p * (dp - row.delta);
  pair.ds_low = view.low(pair.p_low * (view.low(dp) - row.delta));
  return pair;
}

Row attention_dq(View const& view, Position const& at) {
  QueryRow const row = query_row(view, at);
  Sums dq(view.p.dim_qk, view.type());
  for (int64_t j = 0; j < view.p.seqlen_k && view.sees(at.row, j); ++j) {
    auto const k = view.in.k.row(at.batch, at.head / view.group(), j);
    Pair const pair = pair_of(view, row, k, view.in.v.row(at.batch, at.head / view.group(), j));
    dq.add_row(view.scale * pair.ds, view.low(view.scale * pair.ds_low), k);
  }
  return dq.finish();
}

Row attention_dkv(View const& view, Position const& at, bool dv) {
  auto const k = view.in.k.row(at.batch, at.head, at.row), v = view.in.v.row(at.batch, at.head, at.row);
  Sums sums(dv ? view.p.dim_v : view.p.dim_qk, view.type());
  for (int64_t h = at.head * view.group(); h < (at.head + 1) * view.group(); ++h) {
    for (int64_t i = 0; i < view.p.seqlen_q; ++i) {
      if (!view.sees(i, at.row)) continue;
      QueryRow const row = query_row(view, {at.batch, h, i});
      Pair const pair = pair_of(view, row, k, v);
      if (dv) {
        sums.add_row(pair.p, pair.p_low, row.dout);
      } else {
        sums.add_row(view.scale * pair.ds, view.low(view.scale * pair.ds_low), row.q);
      }
    }
  }
  return sums.finish();
}

double decay(double log2_gamma, int64_t distance) { return std::exp2(double(distance) * log2_gamma); }

// sum over tokens of decay^distance (a . other) value, where other and value are rows of a head.
void add_decayed(View const& view, Sums& sums, double log2_gamma, int64_t distance, double product,
                 std::vector<double> const& value) {
  double const power = decay(log2_gamma, distance);
  sums.add_row(view.scale * product * power, view.low(view.low(product) * view.low(power)), value);
}

Row retention_output(View const& view, Position const& at) {
  double const log2_gamma = view.log2_gamma(at.head);
  auto const q = view.in.q.row(at.batch, at.head, at.row);
  Sums o(view.p.dim_v, view.type());
  for (int64_t j = 0; j <= at.row; ++j) {
    double const product = dot(q, view.in.k.row(at.batch, at.head / view.group(), j));
    add_decayed(view, o, log2_gamma, at.row - j, product, view.in.v.row(at.batch, at.head / view.group(), j));
  }
  if (view.in.initial_state.count() > 0) {
    double const power = decay(log2_gamma, at.row + 1);
    for (int64_t d = 0; d < view.p.dim_qk; ++d) {
      auto const state = view.in.initial_state.row(at.batch, at.head, d);
      double const factor = view.scale * power * q[size_t(d)];
      for (size_t e = 0; e < state.size(); ++e) {
        o.row.exact[e] += factor * state[e];
        o.row.low[e] += view.low(power * q[size_t(d)]) * view.low(state[e]);
      }
    }
  }
  return o.finish(view.scale);
}

// Row d of the state after the last token: one column of K with all of V.
Row retention_state(View const& view, Position const& at) {
  double const log2_gamma = view.log2_gamma(at.head);
  Sums state(view.p.dim_v, Number::kFp32);
  for (int64_t j = 0; j < view.p.seqlen_k; ++j) {
    double const k = view.in.k.row(at.batch, at.head / view.group(), j)[size_t(at.row)];
    double const power = decay(log2_gamma, view.p.seqlen_k - 1 - j);
    state.add_row(power * k, view.low(power * k), view.in.v.row(at.batch, at.head / view.group(), j));
  }
  if (view.in.initial_state.count() > 0) {
    double const power = decay(log2_gamma, view.p.seqlen_k);
    state.add_row(power, power, view.in.initial_state.row(at.batch, at.head, at.row));
  }
  return state.finish();
}

Row retention_dq(View const& view, Position const& at) {
  auto const dout = view.in.dout.row(at.batch, at.head, at.row);
  Sums dq(view.p.dim_qk, view.type());
  for (int64_t j = 0; j <= at.row; ++j) {
    double const product = dot(dout, view.in.v.row(at.batch, at.head / view.group(), j));
    add_decayed(view, dq, view.log2_gamma(at.head), at.row - j, product,
                view.in.k.row(at.batch, at.head / view.group(), j));
  }
  return dq.finish(view.scale);
}

Row retention_dkv(View const& view, Position const& at, bool dv) {
  auto const k = view.in.k.row(at.batch, at.head, at.row), v = view.in.v.row(at.batch, at.head, at.row);
  Sums sums(dv ? view.p.dim_v : view.p.dim_qk, view.type());
  for (int64_t h = at.head * view.group(); h < (at.head + 1) * view.group(); ++h) {
    for (int64_t i = at.row; i < view.p.seqlen_q; ++i) {
      auto const q = view.in.q.row(at.batch, h, i), dout = view.in.dout.row(at.batch, h, i);
      double const product = dv ? dot(q, k) : dot(dout, v);
      add_decayed(view, sums, view.log2_gamma(h), i - at.row, product, dv ? dout : q);
    }
  }
  return sums.finish(view.scale);
}

// What is not finite without reason; empty when all is.
std::string unwritten(HostTensor const& output, bool lse) {
  int64_t count = 0, first = -1;
  for (int64_t i = 0; i < output.count(); ++i) {
    double const value = output.value(i);
    if (std::isfinite(value) || (lse && value == -INFINITY)) continue;
    if (count++ == 0) first = i;
  }
  if (count == 0) return "";
  return std::to_string(count) + " of " + std::to_string(output.count()) +
         " elements are not finite, the first at index " + std::to_string(first);
}

double unit_in_last_place(double magnitude, Number type) {
  return std::exp2(std::floor(std::log2(std::max(magnitude, 1e-30)))) * epsilon_of(type);
}

std::string text(double value) {
  char out[32];
  std::snprintf(out, sizeof(out), "%.3g", value);
  return out;
}

}  // namespace

double HostTensor::value(int64_t index) const {
  std::byte const* const at = bytes.data() + size_t(index) * bytes_of(type);
  if (type == Number::kFp32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return decode(bits, type);
}

std::vector<double> HostTensor::row(int64_t batch, int64_t head, int64_t index) const {
  std::vector<double> values(static_cast<size_t>(columns));
  int64_t const first = ((batch * heads + head) * rows + index) * columns;
  for (int64_t i = 0; i < columns; ++i) values[size_t(i)] = value(first + i);
  return values;
}

Row row_of(std::string const& output, Problem const& problem, double scale, HostInputs const& inputs,
           Position const& position) {
  View const view{problem, scale, inputs};
  bool const retention = problem.op == Op::kRetention;
  if (output == "o") return retention ? retention_output(view, position) : attention_output(view, position, false);
  if (output == "lse") return attention_output(view, position, true);
  if (output == "final_state") return retention_state(view, position);
  if (output == "dq") return retention ? retention_dq(view, position) : attention_dq(view, position);
  bool const dv = output == "dv";
  return retention ? retention_dkv(view, position, dv) : attention_dkv(view, position, dv);
}

std::vector<Position> sample(HostTensor const& output, int64_t batch, int count, uint64_t seed) {
  std::vector<Position> positions;
  std::set<std::tuple<int64_t, int64_t, int64_t>> known;
  auto const take = [&](int64_t b, int64_t h, int64_t r) {
    if (known.insert({b, h, r}).second) positions.push_back({b, h, r});
  };
  take(0, 0, 0);
  take(batch - 1, output.heads - 1, output.rows - 1);
  int64_t const wanted = std::min<int64_t>(count, batch * output.heads * output.rows);
  std::mt19937_64 random(seed);
  while (int64_t(positions.size()) < wanted) {
    auto const below = [&random](int64_t end) { return int64_t(random() % uint64_t(end)); };
    int64_t const b = below(batch), h = below(output.heads);
    take(b, h, below(output.rows));
  }
  return positions;
}

Check compare(std::string const& name, HostTensor const& output, Problem const& problem, double scale,
              HostInputs const& inputs, int samples, uint64_t seed) {
  Check check;
  check.output = name;
  bool const lse = name == "lse";
  check.reason = unwritten(output, lse);
  if (!check.reason.empty()) return check;
  std::vector<Position> const positions = sample(output, problem.batch, samples, seed);
  std::vector<Row> rows(positions.size());
  std::atomic<size_t> next{0};
  auto const work = [&] {
    for (size_t i = next++; i < positions.size(); i = next++) {
      rows[i] = row_of(name, problem, scale, inputs, positions[i]);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();

  double largest = 0, low_error = 0, low_norm = 0, norm = 0, count = 0;
  size_t worst = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<double> const values = output.row(positions[i].batch, positions[i].head, positions[i].row);
    for (size_t e = 0; e < values.size(); ++e, ++count) {
      double const exact = rows[i].exact[e], low = rows[i].low[e];
      if (exact == -INFINITY || values[e] == -INFINITY) {
        if (exact != values[e])
          check.reason = "minus infinity where the exact value is another, or the other way round";
        continue;
      }
      double const error = std::fabs(values[e] - exact);
      if (error > check.max_error) worst = i, check.max_error = error;
      largest = std::max(largest, std::fabs(exact));
      norm += error * error;
      if (!std::isfinite(low)) continue;  // what overflowed in the input type excuses nothing
      low_error = std::max(low_error, std::fabs(low - exact));
      low_norm += (low - exact) * (low - exact);
    }
  }
  double const eps = kUlps * unit_in_last_place(largest, output.type);
  double const widened = problem.op == Op::kRetention ? kRetentionFactor : 1.0;
  check.rows = int64_t(rows.size());
  check.norm_error = std::sqrt(norm);
  check.max_allowed = kMaxFactor * widened * low_error + eps;
  check.norm_allowed = kNormFactor * widened * std::sqrt(low_norm) + eps * std::sqrt(count);
  if (!check.reason.empty()) return check;
  if (!(check.max_error <= check.max_allowed)) {
    Position const& at = positions[worst];
    check.reason = "largest error " + text(check.max_error) + " in batch " + std::to_string(at.batch) + ", head " +
                   std::to_string(at.head) + ", row " + std::to_string(at.row) + ", allowed " + text(check.max_allowed);
  } else if (!(check.norm_error <= check.norm_allowed)) {
    check.reason = "norm of the error " + text(check.norm_error) + ", allowed " + text(check.norm_allowed);
  }
  return check;
}

}  // namespace attention_autotuner::benchmarks
