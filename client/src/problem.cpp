#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "attention_autotuner/client.hpp"
#include "problem_json.hpp"

namespace attention_autotuner {
namespace {

constexpr int64_t kMaxExtent = int64_t(1) << 30;
constexpr int64_t kMaxRetentionSequences = 65535;
constexpr int64_t kDimMultiple = 8, kMaxDimQK = 256, kMaxDimV = 512;

// In the order of the enumerators.
constexpr char const* kOps[] = {"attention", "retnet", "retention", "gemm"};
constexpr char const* kDirections[] = {"forward", "backward"};
constexpr char const* kDTypes[] = {"fp16", "bf16"};
constexpr char const* kAlignments[] = {"bottom_right", "top_left"};
constexpr char const* kMasks[] = {"none", "explicit", "decay"};
constexpr char const* kForms[] = {"auto", "parallel", "chunkwise", "recurrent"};
constexpr char const* kOperands[] = {"nn", "nt", "tn", "tt"};
constexpr char const* kLayers[] = {"record", "shipped", "predicted", "default"};

template <typename Enum, size_t Count>
Enum enum_of(char const* const (&names)[Count], std::string const& field, std::string const& name) {
  std::string known;
  for (size_t i = 0; i < Count; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
    known += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  throw UnsupportedProblemError(field + " must be one of " + known + ", got \"" + name + "\"");
}

void require(bool condition, std::string const& message) {
  if (!condition) throw UnsupportedProblemError(message);
}

std::string text(int64_t value) { return std::to_string(value); }

void check_retention(Problem const& p) {
  std::string const op = name_of(p.op);
  require((p.op == Op::kRetNet) == (p.mask != Mask::kNone),
          "mask must be explicit or decay for retnet and none for others, got " + std::string(name_of(p.mask)) +
              " for " + op);
  bool const has_forms = p.op == Op::kRetention && p.direction == Direction::kForward;
  require(p.form == Form::kAuto || has_forms, "form is for retention forward, got " + std::string(name_of(p.form)) +
                                                  " for " + op + " " + name_of(p.direction));
  require(p.op == Op::kAttention || p.causal_alignment == CausalAlignment::kBottomRight,
          "causal_alignment must be bottom_right for " + op + ", got " + name_of(p.causal_alignment));
  bool const decays = p.op == Op::kRetention || p.mask == Mask::kDecay;
  require(p.causal || !decays, op + " with decay is causal, got causal=false");
  if (p.op != Op::kRetention) return;
  require(p.batch * p.heads_q <= kMaxRetentionSequences, "batch * heads_q must be at most " +
                                                             text(kMaxRetentionSequences) + " for retention, got " +
                                                             text(p.batch * p.heads_q));
  require(p.seqlen_q == p.seqlen_k,
          "retention takes as many queries as keys, got " + text(p.seqlen_q) + " and " + text(p.seqlen_k));
}

void check_gemm(Problem const& p) {
  require(p.operands == Operands::kNN || p.op == Op::kGemm,
          "operands is for gemm, got " + std::string(name_of(p.operands)) + " for " + name_of(p.op));
  if (p.op != Op::kGemm) return;
  require(p.direction == Direction::kForward, "gemm is forward, got direction=" + std::string(name_of(p.direction)));
  require(p.batch == 1 && p.heads_q == 1 && p.heads_kv == 1, "batch, heads_q and heads_kv must be 1 for gemm, got " +
                                                                 text(p.batch) + ", " + text(p.heads_q) + ", " +
                                                                 text(p.heads_kv));
  require(p.seqlen_q == p.seqlen_k,
          "gemm has as many rows everywhere, got seqlen_q " + text(p.seqlen_q) + " and seqlen_k " + text(p.seqlen_k));
  require(!p.causal, "gemm is not causal, got causal=true");
  require(p.alignment_bytes == 16,
          "alignment_bytes must be 16 for gemm, whose matrices come by TMA, got " + text(p.alignment_bytes));
  require(p.operands == Operands::kNN || p.operands == Operands::kNT || p.seqlen_q % kDimMultiple == 0,
          "rows of A that lies by columns must be a multiple of 8, got " + text(p.seqlen_q));
}

int64_t bucket(int64_t seqlen) {
  int64_t power = 16;
  while (power < seqlen) power *= 2;
  return power;
}

double doublings(int64_t a, int64_t b) { return std::fabs(std::log2(double(a) / double(b))); }

// Tiles of queries, or of keys where gradients are computed, up to as many as fill a GPU: the twin of _tiles() in
// tuning/lookup.py.
int64_t tiles(Problem const& p) {
  constexpr int64_t kTileRows = 128, kFullTiles = 1024;
  bool const by_keys = p.direction == Direction::kBackward;
  int64_t const rows = by_keys ? p.seqlen_k : p.seqlen_q, heads = by_keys ? p.heads_kv : p.heads_q;
  return std::max<int64_t>(1, std::min(kFullTiles, p.batch * heads * ((rows + kTileRows - 1) / kTileRows)));
}

}  // namespace

char const* name_of(Op value) { return kOps[static_cast<int>(value)]; }
char const* name_of(Direction value) { return kDirections[static_cast<int>(value)]; }
char const* name_of(DType value) { return kDTypes[static_cast<int>(value)]; }
char const* name_of(CausalAlignment value) { return kAlignments[static_cast<int>(value)]; }
char const* name_of(Mask value) { return kMasks[static_cast<int>(value)]; }
char const* name_of(Form value) { return kForms[static_cast<int>(value)]; }
char const* name_of(Operands value) { return kOperands[static_cast<int>(value)]; }
char const* name_of(Layer value) { return kLayers[static_cast<int>(value)]; }

void Problem::check() const {
  std::pair<char const*, int64_t> const extents[] = {
      {"batch", batch}, {"heads_q", heads_q}, {"heads_kv", heads_kv}, {"seqlen_q", seqlen_q}, {"seqlen_k", seqlen_k}};
  for (auto const& [name, value] : extents) {
    require(value >= 1, std::string(name) + " must be at least 1, got " + text(value));
    require(value <= kMaxExtent, std::string(name) + " must be at most 2**30, got " + text(value));
  }
  require(heads_q % heads_kv == 0,
          "heads_q must be a multiple of heads_kv, got " + text(heads_q) + " and " + text(heads_kv));
  bool const product = op == Op::kGemm;
  std::tuple<char const*, int64_t, int64_t> const dims[] = {{"dim_qk", dim_qk, product ? kMaxExtent : kMaxDimQK},
                                                            {"dim_v", dim_v, product ? kMaxExtent : kMaxDimV}};
  for (auto const& [name, value, limit] : dims) {
    require(value >= kDimMultiple && value % kDimMultiple == 0,
            std::string(name) + " must be a positive multiple of 8, got " + text(value));
    require(value <= limit, std::string(name) + " must be at most " + text(limit) + ", got " + text(value));
  }
  require(alignment_bytes == 2 || alignment_bytes == 16,
          "alignment_bytes must be 2 or 16, got " + text(alignment_bytes));
  require(!deterministic || direction == Direction::kBackward,
          "deterministic is for backward problems: every forward kernel is, got deterministic=true");
  require(!key_bounds || (op == Op::kAttention && direction == Direction::kForward),
          std::string("key_bounds is for attention forward, got key_bounds=true for ") + name_of(op) + " " +
              name_of(direction));
  check_retention(*this);
  check_gemm(*this);
}

double Problem::flops() const {
  double const rows = 2.0 * batch * heads_q * seqlen_q;
  bool const forward = direction == Direction::kForward;
  if (op == Op::kGemm) return rows * dim_qk * dim_v;
  if (op == Op::kRetention) return rows * dim_qk * dim_v * (forward ? 2 : 5);
  double const of_pair = 2.0 * batch * heads_q * (forward ? dim_qk + dim_v : 3 * dim_qk + 2 * dim_v);
  if (!causal || seqlen_q == seqlen_k) return of_pair * seqlen_q * seqlen_k / (causal ? 2 : 1);
  // The sum of 0, 1, ..., as far as there are keys, and of all keys from there on, of the first so many.
  auto const sum_of = [this](int64_t count) {
    double const rising = double(std::clamp<int64_t>(count, 0, seqlen_k));
    return rising * (rising - 1) / 2 + double(std::max<int64_t>(count - seqlen_k, 0)) * double(seqlen_k);
  };
  int64_t const first = causal_offset() + 1;
  return of_pair * (sum_of(seqlen_q + first) - sum_of(first));
}

double Problem::bytes_moved() const {
  double const rows_q = double(batch) * heads_q * seqlen_q, rows_k = double(batch) * heads_kv * seqlen_k;
  double more = mask == Mask::kExplicit ? 2.0 * heads_q * seqlen_q * seqlen_k : 0.0;
  if (op == Op::kRetention) more += 2.0 * 4 * batch * heads_q * dim_qk * dim_v;
  double const dims = double(dim_qk + dim_v);
  if (op == Op::kGemm) return 2 * (rows_q * dims + double(dim_qk) * double(dim_v));
  if (direction == Direction::kForward) return 2 * (rows_q + rows_k) * dims + more;
  if (op == Op::kRetention) return 2 * (2 * rows_k * dims + rows_q * (dims + dim_qk)) + 2 * more;
  return 2 * (rows_q + rows_k) * 2 * dims + 4 * rows_q + more;
}

Problem Problem::bucketed() const {
  Problem rounded = *this;
  rounded.seqlen_q = bucket(seqlen_q);
  rounded.seqlen_k = bucket(seqlen_k);
  return rounded;
}

bool Problem::goes_by_tiles() const {
  constexpr int64_t kFewQueries = 64;
  return op == Op::kAttention && seqlen_q > kFewQueries;
}

Problem Problem::rounded() const {
  if (op == Op::kRetention && direction == Direction::kForward && seqlen_q == 1) return *this;
  if (!goes_by_tiles()) return bucketed();
  constexpr int64_t kLengthStep = 16;
  Problem rounded = *this;
  for (int64_t* length : {&rounded.seqlen_q, &rounded.seqlen_k}) {
    *length = (*length + kLengthStep - 1) / kLengthStep * kLengthStep;
  }
  return rounded;
}

std::string Problem::describe() const {
  auto const pair = [](char const* letter, int64_t a, int64_t b, char const* between) {
    return letter + text(a) + (a == b ? "" : between + text(b));
  };
  std::string out = name_of(op);
  if (form != Form::kAuto) out += std::string(" ") + name_of(form);
  out += std::string(" ") + name_of(direction) + " " + name_of(dtype) + " b" + text(batch) + " ";
  out += pair("h", heads_q, heads_kv, "/") + " " + pair("s", seqlen_q, seqlen_k, "x") + " " +
         pair("d", dim_qk, dim_v, "/");
  if (causal) out += causal_alignment == CausalAlignment::kBottomRight ? " causal" : " causal-top-left";
  if (op == Op::kRetNet) out += std::string(" ") + name_of(mask);
  if (key_bounds) out += " key-bounds";
  if (operands != Operands::kNN) out += std::string(" ") + name_of(operands);
  if (alignment_bytes == 2) out += " narrow";
  if (deterministic) out += " deterministic";
  return out;
}

bool Problem::operator==(Problem const& other) const {
  auto const all = [](Problem const& p) {
    return std::tie(p.op, p.direction, p.dtype, p.batch, p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_k, p.dim_qk,
                    p.dim_v, p.causal, p.causal_alignment, p.alignment_bytes, p.deterministic, p.mask, p.form,
                    p.key_bounds, p.operands);
  };
  return all(*this) == all(other);
}

Problem Problem::from_json(std::string const& document) {
  try {
    return problem_of(json::parse(document), false);
  } catch (json::ParseError const& error) {
    throw UnsupportedProblemError(std::string("no problem in JSON: ") + error.what());
  }
}

std::optional<double> distance(Problem const& problem, Problem const& recorded) {
  auto const fixed = [](Problem const& p) {
    return std::make_tuple(p.op, p.direction, p.dtype, p.padded_dim_qk(), p.padded_dim_v(), p.causal, p.alignment_bytes,
                           p.deterministic, p.mask, p.form, p.key_bounds, p.operands);
  };
  if (fixed(problem) != fixed(recorded)) return std::nullopt;
  // Summed in the order that Python's does it, so that ties are ties in both.
  double apart = 0;
  apart += doublings(problem.seqlen_q, recorded.seqlen_q);
  apart += doublings(problem.seqlen_k, recorded.seqlen_k);
  apart += doublings(problem.batch * problem.heads_q, recorded.batch * recorded.heads_q);
  apart += doublings(problem.heads_q / problem.heads_kv, recorded.heads_q / recorded.heads_kv);
  if (problem.op == Op::kGemm) {
    apart += doublings(problem.dim_qk, recorded.dim_qk);
    apart += doublings(problem.dim_v, recorded.dim_v);
  }
  if (problem.dim_qk != recorded.dim_qk || problem.dim_v != recorded.dim_v) apart += 0.25;
  if (problem.causal_alignment != recorded.causal_alignment) apart += 0.25;
  constexpr double kMaxFillDistance = 1.0;
  if (problem.op != Op::kGemm && doublings(tiles(problem), tiles(recorded)) > kMaxFillDistance) apart += kMaxDistance;
  return apart;
}

Problem listed_as(Problem const& problem, Layer layer) {
  return layer == Layer::kRecord ? problem.bucketed() : problem.rounded();
}

bool serves_lengths(Problem const& measured, Problem const& problem) {
  if (!problem.goes_by_tiles()) return true;
  Problem const now = problem.rounded(), then = measured.rounded();
  return now.seqlen_q == then.seqlen_q && now.seqlen_k == then.seqlen_k;
}

Problem problem_of(json::Value const& object, bool complete) {
  using json::Value;
  Problem p;
  std::pair<char const*, std::function<void(Value const&)>> const fields[] = {
      {"op", [&](Value const& v) { p.op = enum_of<Op>(kOps, "op", v.string()); }},
      {"direction", [&](Value const& v) { p.direction = enum_of<Direction>(kDirections, "direction", v.string()); }},
      {"dtype", [&](Value const& v) { p.dtype = enum_of<DType>(kDTypes, "dtype", v.string()); }},
      {"batch", [&](Value const& v) { p.batch = v.integer(); }},
      {"heads_q", [&](Value const& v) { p.heads_q = v.integer(); }},
      {"heads_kv", [&](Value const& v) { p.heads_kv = v.integer(); }},
      {"seqlen_q", [&](Value const& v) { p.seqlen_q = v.integer(); }},
      {"seqlen_k", [&](Value const& v) { p.seqlen_k = v.integer(); }},
      {"dim_qk", [&](Value const& v) { p.dim_qk = v.integer(); }},
      {"dim_v", [&](Value const& v) { p.dim_v = v.integer(); }},
      {"causal", [&](Value const& v) { p.causal = v.boolean(); }},
      {"causal_alignment",
       [&](Value const& v) {
         p.causal_alignment = enum_of<CausalAlignment>(kAlignments, "causal_alignment", v.string());
       }},
      {"alignment_bytes", [&](Value const& v) { p.alignment_bytes = v.integer(); }},
      {"deterministic", [&](Value const& v) { p.deterministic = v.boolean(); }},
      {"mask", [&](Value const& v) { p.mask = enum_of<Mask>(kMasks, "mask", v.string()); }},
      {"form", [&](Value const& v) { p.form = enum_of<Form>(kForms, "form", v.string()); }},
      {"key_bounds", [&](Value const& v) { p.key_bounds = v.boolean(); }},
      {"operands", [&](Value const& v) { p.operands = enum_of<Operands>(kOperands, "operands", v.string()); }},
  };
  std::string_view const later[] = {"key_bounds", "operands"};  // written only where they are not the defaults
  size_t known = 0;
  for (auto const& [name, set] : fields) {
    bool const optional = name == later[0] || name == later[1];
    Value const* value = complete && !optional ? &object.at(name) : object.find(name);
    if (value == nullptr) continue;
    ++known;
    try {
      set(*value);
    } catch (json::ParseError const& error) {
      throw json::ParseError("\"" + std::string(name) + "\": " + error.what());
    }
  }
  if (known != object.members().size()) {
    for (auto const& member : object.members()) {
      bool known_field = false;
      for (auto const& field : fields) known_field = known_field || member.first == field.first;
      if (!known_field) throw json::ParseError("a problem has no field \"" + member.first + "\"");
    }
  }
  p.check();
  return p;
}

Layer layer_of(std::string const& name) {
  for (size_t i = 0; i < std::size(kLayers); ++i) {
    if (name == kLayers[i]) return static_cast<Layer>(i);
  }
  throw json::ParseError("unknown layer \"" + name + "\"");
}

namespace {

template <typename Params>
void set_sizes(Params& params, Problem const& problem, std::optional<float> scale) {
  float const factor =
      scale.value_or(problem.op == Op::kRetNet ? 1.0f : float(1.0 / std::sqrt(double(problem.dim_qk))));
  params.batch = int32_t(problem.batch);
  params.heads_q = int32_t(problem.heads_q);
  params.heads_kv = int32_t(problem.heads_kv);
  params.dim_qk = int32_t(problem.dim_qk);
  params.dim_v = int32_t(problem.dim_v);
  if constexpr (ParamsOf<Params>::kOp == Op::kRetention) {
    params.seqlen = int32_t(problem.seqlen_q);
    params.scale = factor;
  } else {
    params.seqlen_q = int32_t(problem.seqlen_q);
    params.seqlen_k = int32_t(problem.seqlen_k);
    params.causal = problem.causal;
    params.causal_offset = int32_t(problem.causal_offset());
  }
  if constexpr (ParamsOf<Params>::kOp == Op::kAttention) {
    params.softmax_scale = factor;
    params.window_left = params.window_right = -1;
  }
  if constexpr (std::is_same_v<Params, AttentionForwardParams>) {
    params.causal_from_end = problem.key_bounds && problem.causal_alignment == CausalAlignment::kBottomRight;
  }
  if constexpr (ParamsOf<Params>::kOp == Op::kRetNet) {
    params.scale = factor;
    params.r_clamp_max = std::numeric_limits<float>::infinity();
    if constexpr (ParamsOf<Params>::kDirection == Direction::kForward) params.normalize = 1;
  }
}

}  // namespace

template <typename Params>
Params make_params(Problem const& problem, std::optional<float> scale) {
  problem.check();
  if (problem.op != ParamsOf<Params>::kOp || problem.direction != ParamsOf<Params>::kDirection) {
    throw UnsupportedProblemError("these params are for " + std::string(name_of(ParamsOf<Params>::kOp)) + " " +
                                  name_of(ParamsOf<Params>::kDirection) + ", the problem is " + problem.describe());
  }
  Params params{};
  params.struct_size = sizeof(Params);
  params.abi_version = ATTENTION_AUTOTUNER_ABI_VERSION;
  if constexpr (ParamsOf<Params>::kOp == Op::kGemm) {
    params.m = int32_t(problem.seqlen_q);
    params.n = int32_t(problem.dim_v);
    params.k = int32_t(problem.dim_qk);
  } else {
    set_sizes(params, problem, scale);
  }
  return params;
}

template AttentionForwardParams make_params(Problem const&, std::optional<float>);
template AttentionBackwardParams make_params(Problem const&, std::optional<float>);
template RetNetForwardParams make_params(Problem const&, std::optional<float>);
template RetNetBackwardParams make_params(Problem const&, std::optional<float>);
template RetentionForwardParams make_params(Problem const&, std::optional<float>);
template RetentionBackwardParams make_params(Problem const&, std::optional<float>);
template GemmForwardParams make_params(Problem const&, std::optional<float>);

}  // namespace attention_autotuner
