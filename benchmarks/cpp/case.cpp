#include "case.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "pool.hpp"

namespace attention_autotuner::benchmarks {
namespace {

// As in operations/shared/tensors.py: elements before and after an output, bytes before and after the workspace.
constexpr size_t kGuard = 4096;
constexpr int kGuardByte = 0x5A, kNanByte = 0xFF;  // the latter, repeated, is a NaN in every float type
constexpr uint64_t kSeedStep = 16;                 // seeds of one set, more than it has tensors

enum class Role { kNormal, kDecays, kDerived, kOutput };

// A tensor that params name.
struct Slot {
  std::string name;
  Role role;
  HostTensor shape;
  int64_t count;
  size_t offset;  // bytes from a 256-byte boundary to its first element
};

template <typename Params>
using Bind = std::function<void(Params&, void*)>;

template <typename Params>
class TypedCase : public Case {
 public:
  TypedCase(Problem const& problem, Kernel const& kernel, int device) : p_(problem), kernel_(kernel), device_(device) {
    static_cast<void>(kernel.workspace_bytes(make_params<Params>(problem)));  // another kernel's params throw here
  }

  int sets() const override { return int(sets_.size()); }
  size_t workspace_bytes() const override { return workspace_bytes_; }

  void launch(int set, Stream const& stream) override {
    void* const workspace = workspace_.data == nullptr ? nullptr : workspace_.data + kGuard;
    kernel_.launch(sets_[size_t(set)].params, workspace, stream.handle(), device_);
  }

  std::vector<Check> verify(Stream const& stream, int samples, uint64_t seed) override {
    run_poisoned(stream);
    HostInputs inputs;
    std::vector<std::pair<std::string, HostTensor>> outputs;
    for (size_t i = 0; i < slots_.size(); ++i) {
      HostTensor tensor = downloaded(i);
      if (slots_[i].role == Role::kOutput) {
        outputs.emplace_back(slots_[i].name, std::move(tensor));
      } else {
        input_of(inputs, slots_[i].name) = std::move(tensor);
      }
    }
    check_repeats(stream, outputs);
    std::vector<Check> checks;
    for (auto const& [name, tensor] : outputs) {
      checks.push_back(compare(name, tensor, p_, scale(), inputs, samples, seed));
    }
    return checks;
  }

  void add_tensor(Tensor Params::* member, std::string name, Role role, int64_t heads, int64_t rows, int64_t columns) {
    bool const narrow = p_.alignment_bytes == 2 && role == Role::kNormal;
    add({std::move(name),
         role,
         {type(), heads, rows, columns, {}},
         p_.batch * heads * rows * columns,
         narrow ? bytes_of(type()) : 0},
        [=](Params& params, void* data) { params.*member = contiguous(data, heads, rows, columns); });
  }

  template <typename Pointer>
  void add_floats(Pointer Params::* member, std::string name, Role role, HostTensor shape, int64_t count) {
    add({std::move(name), role, std::move(shape), count, 0},
        [=](Params& params, void* data) { params.*member = static_cast<float*>(data); });
  }

  // Makes sets of everything that was added; those that are derived are left to a function. Memory is taken in the
  // order of the Python measurer: the inputs of all sets, then the outputs of all sets, then the workspace.
  void make_sets(int count, uint64_t seed, std::function<void(Params const&)> const& derive) {
    sets_.assign(size_t(count), {make_params<Params>(p_), std::vector<Block>(slots_.size())});
    for (int set = 0; set < count; ++set) {
      for (size_t i = 0; i < slots_.size(); ++i) {
        if (slots_[i].role == Role::kOutput) continue;
        place(set, i);
        fill(slots_[i], data_of(set, i), seed + kSeedStep * uint64_t(set) + i);
      }
      derive(sets_[size_t(set)].params);
    }
    for (int set = 0; set < count; ++set) {
      for (size_t i = 0; i < slots_.size(); ++i) {
        if (slots_[i].role == Role::kOutput) place(set, i);
      }
      workspace_bytes_ = std::max(workspace_bytes_, kernel_.workspace_bytes(sets_[size_t(set)].params));
    }
    if (workspace_bytes_ > 0) workspace_ = pool_.take(workspace_bytes_ + 2 * kGuard);
    synchronize();
  }

 private:
  struct Set {
    Params params;
    std::vector<Block> memory;  // of every slot
  };

  Number type() const { return p_.dtype == DType::kFp16 ? Number::kFp16 : Number::kBf16; }

  double scale() const {
    if constexpr (ParamsOf<Params>::kOp == Op::kAttention) {
      return sets_[0].params.softmax_scale;
    } else {
      return sets_[0].params.scale;
    }
  }

  void add(Slot slot, Bind<Params> bind) {
    slots_.push_back(std::move(slot));
    binds_.push_back(std::move(bind));
  }

  void place(int set, size_t slot) {
    size_t const bytes = size_t(slots_[slot].count) * bytes_of(slots_[slot].shape.type);
    sets_[size_t(set)].memory[slot] = pool_.take(bytes + slots_[slot].offset + 2 * guard_of(slot));
    binds_[slot](sets_[size_t(set)].params, data_of(set, slot));
  }

  // Bytes before and after a tensor.
  size_t guard_of(size_t slot) const {
    return slots_[slot].role == Role::kOutput ? kGuard * bytes_of(slots_[slot].shape.type) : 0;
  }

  void* data_of(int set, size_t slot) const {
    return sets_[size_t(set)].memory[slot].data + guard_of(slot) + slots_[slot].offset;
  }

  void fill(Slot const& slot, void* data, uint64_t seed) const {
    if (slot.role == Role::kNormal) fill_normal(data, size_t(slot.count), slot.shape.type, seed);
    if (slot.role != Role::kDecays) return;
    std::vector<float> decays;  // log2(1 - 2^(-5-h)), as the reference has them
    for (int64_t h = 0; h < slot.count; ++h) {
      decays.push_back(float(std::log1p(-std::exp2(double(-5 - h))) / std::log(2.0)));
    }
    upload(data, decays.data(), decays.size() * sizeof(float));
  }

  static HostTensor& input_of(HostInputs& inputs, std::string const& name) {
    std::pair<char const*, HostTensor*> const all[] = {{"q", &inputs.q},
                                                       {"k", &inputs.k},
                                                       {"v", &inputs.v},
                                                       {"o", &inputs.o},
                                                       {"dout", &inputs.dout},
                                                       {"lse", &inputs.lse},
                                                       {"log2_gamma", &inputs.log2_gamma}};
    for (auto const& [known, tensor] : all) {
      if (name == known) return *tensor;
    }
    return inputs.initial_state;
  }

  HostTensor downloaded(size_t slot) const {
    HostTensor tensor = slots_[slot].shape;
    tensor.bytes.resize(size_t(slots_[slot].count) * bytes_of(tensor.type));
    download(tensor.bytes.data(), data_of(0, slot), tensor.bytes.size());
    return tensor;
  }

  // Runs the first set once over NaN and looks at the guards.
  void run_poisoned(Stream const& stream) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].role == Role::kOutput) poison(sets_[0].memory[i], guard_of(i));
    }
    if (workspace_.data != nullptr) poison(workspace_, kGuard);
    synchronize();
    launch(0, stream);
    synchronize();
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].role == Role::kOutput) check_guards(sets_[0].memory[i], guard_of(i), slots_[i].name);
    }
    if (workspace_.data != nullptr) check_guards(workspace_, kGuard, "the workspace");
  }

  static void poison(Block const& block, size_t guard) {
    fill_bytes(block.data, kGuardByte, block.bytes);
    fill_bytes(block.data + guard, kNanByte, block.bytes - 2 * guard);
  }

  static void check_guards(Block const& block, size_t guard, std::string const& name) {
    std::vector<std::byte> edge(guard);
    for (size_t const begin : {size_t(0), block.bytes - guard}) {
      download(edge.data(), block.data + begin, guard);
      bool const intact = std::all_of(edge.begin(), edge.end(), [](std::byte b) { return b == std::byte(kGuardByte); });
      if (!intact) throw WrongError("bytes beside " + name + " changed");
    }
  }

  // Every forward kernel gives equal bits from equal inputs, and those backward ones that are asked to.
  void check_repeats(Stream const& stream, std::vector<std::pair<std::string, HostTensor>> const& outputs) {
    if (p_.direction == Direction::kBackward && !p_.deterministic) return;
    run_poisoned(stream);
    size_t next = 0;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].role != Role::kOutput) continue;
      if (downloaded(i).bytes != outputs[next++].second.bytes) {
        throw WrongError("two runs on the same input differ in " + slots_[i].name);
      }
    }
  }

  Problem p_;
  Kernel kernel_;
  int device_;
  std::vector<Slot> slots_;
  std::vector<Bind<Params>> binds_;
  Pool pool_;
  std::vector<Set> sets_;
  Block workspace_;
  size_t workspace_bytes_ = 0;
};

template <typename Params>
void add_qkv(TypedCase<Params>& made, Problem const& p) {
  made.add_tensor(&Params::q, "q", Role::kNormal, p.heads_q, p.seqlen_q, p.dim_qk);
  made.add_tensor(&Params::k, "k", Role::kNormal, p.heads_kv, p.seqlen_k, p.dim_qk);
  made.add_tensor(&Params::v, "v", Role::kNormal, p.heads_kv, p.seqlen_k, p.dim_v);
}

template <typename Params>
void add_gradients(TypedCase<Params>& made, Problem const& p) {
  made.add_tensor(&Params::dq, "dq", Role::kOutput, p.heads_q, p.seqlen_q, p.dim_qk);
  made.add_tensor(&Params::dk, "dk", Role::kOutput, p.heads_kv, p.seqlen_k, p.dim_qk);
  made.add_tensor(&Params::dv, "dv", Role::kOutput, p.heads_kv, p.seqlen_k, p.dim_v);
}

HostTensor rows_of(Problem const& p) { return {Number::kFp32, p.heads_q, p.seqlen_q, 1, {}}; }

using Made = std::unique_ptr<Case>;

Made attention_forward(Problem const& p, Kernel const& kernel, int device, int sets, uint64_t seed) {
  using Params = AttentionForwardParams;
  auto made = std::make_unique<TypedCase<Params>>(p, kernel, device);
  add_qkv(*made, p);
  made->add_tensor(&Params::o, "o", Role::kOutput, p.heads_q, p.seqlen_q, p.dim_v);
  made->add_floats(&Params::lse, "lse", Role::kOutput, rows_of(p), p.batch * p.heads_q * p.seqlen_q);
  made->make_sets(sets, seed, [](Params const&) {});
  return made;
}

Made attention_backward(Problem const& p, Kernel const& kernel, int device, int sets, uint64_t seed) {
  using Params = AttentionBackwardParams;
  auto made = std::make_unique<TypedCase<Params>>(p, kernel, device);
  add_qkv(*made, p);
  made->add_tensor(&Params::o, "o", Role::kDerived, p.heads_q, p.seqlen_q, p.dim_v);
  made->add_tensor(&Params::dout, "dout", Role::kNormal, p.heads_q, p.seqlen_q, p.dim_v);
  made->add_floats(&Params::lse, "lse", Role::kDerived, rows_of(p), p.batch * p.heads_q * p.seqlen_q);
  add_gradients(*made, p);
  Problem forward = p;
  forward.direction = Direction::kForward;
  forward.deterministic = false;
  made->make_sets(sets, seed, [forward](Params const& params) {
    auto forward_params = make_params<AttentionForwardParams>(forward);
    forward_params.q = params.q;
    forward_params.k = params.k;
    forward_params.v = params.v;
    forward_params.o = params.o;
    forward_params.lse = const_cast<float*>(params.lse);
    attention_by_formula(forward_params, forward.dtype == DType::kFp16 ? Number::kFp16 : Number::kBf16);
  });
  return made;
}

Made retention_forward(Problem const& p, Kernel const& kernel, int device, int sets, uint64_t seed) {
  using Params = RetentionForwardParams;
  auto made = std::make_unique<TypedCase<Params>>(p, kernel, device);
  add_qkv(*made, p);
  made->add_floats(&Params::log2_gamma, "log2_gamma", Role::kDecays, {Number::kFp32, 1, 1, p.heads_q, {}}, p.heads_q);
  made->add_tensor(&Params::o, "o", Role::kOutput, p.heads_q, p.seqlen_q, p.dim_v);
  if (p.form == Form::kRecurrent || p.seqlen_q == 1) {  // a step of decoding reads and writes states
    HostTensor const state{Number::kFp32, p.heads_q, p.dim_qk, p.dim_v, {}};
    int64_t const count = p.batch * p.heads_q * p.dim_qk * p.dim_v;
    made->add_floats(&Params::initial_state, "initial_state", Role::kNormal, state, count);
    made->add_floats(&Params::final_state, "final_state", Role::kOutput, state, count);
  }
  made->make_sets(sets, seed, [](Params const&) {});
  return made;
}

Made retention_backward(Problem const& p, Kernel const& kernel, int device, int sets, uint64_t seed) {
  using Params = RetentionBackwardParams;
  auto made = std::make_unique<TypedCase<Params>>(p, kernel, device);
  add_qkv(*made, p);
  made->add_floats(&Params::log2_gamma, "log2_gamma", Role::kDecays, {Number::kFp32, 1, 1, p.heads_q, {}}, p.heads_q);
  made->add_tensor(&Params::dout, "dout", Role::kNormal, p.heads_q, p.seqlen_q, p.dim_v);
  add_gradients(*made, p);
  made->make_sets(sets, seed, [](Params const&) {});
  return made;
}

}  // namespace

Made make_case(Problem const& problem, Kernel const& kernel, int device, int sets, uint64_t seed) {
  bool const forward = problem.direction == Direction::kForward;
  if (problem.op == Op::kRetention) {
    return (forward ? retention_forward : retention_backward)(problem, kernel, device, sets, seed);
  }
  return (forward ? attention_forward : attention_backward)(problem, kernel, device, sets, seed);
}

}  // namespace attention_autotuner::benchmarks
