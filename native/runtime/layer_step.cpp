#include "runtime/layer_step.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "compute/bfloat16.hpp"
#include "compute/elementwise.hpp"
#include "compute/gemv.hpp"
#include "simd/gemv_kernels.hpp"

namespace zipmoe {
namespace {

// As a norm that is a call of its own: few rows in the caller's floating-point environment.
void normalise(Engine& engine, const RmsNorm& norm, const BFloat16Rows& x, uint16_t* out) {
  if (x.values.size() >= kNormValuesForThreads) return engine.normalise(norm, x, out);
  rms_norm(norm, x.values.data(), x.rows, x.columns(), out, simd::norm_kernels(engine.instruction_set()));
}

// Which rows go to which expert: distinct ids in ascending order.
struct RoutedExperts {
  std::vector<RecordIndex> records;
  std::vector<uint32_t> tokens;    // of each
  std::vector<int64_t> positions;  // in the flattened ids, expert after expert

  RoutedExperts(std::span<const int64_t> ids, std::span<const RecordIndex> records_by_id) : positions(ids.size()) {
    std::iota(positions.begin(), positions.end(), 0);
    const auto id_at = [&](int64_t position) { return ids[static_cast<uint64_t>(position)]; };
    std::stable_sort(positions.begin(), positions.end(), [&](int64_t a, int64_t b) { return id_at(a) < id_at(b); });
    for (size_t i = 0; i < positions.size(); ++i) {
      const int64_t id = id_at(positions[i]);
      if (i == 0 || id != id_at(positions[i - 1])) {
        records.push_back(records_by_id[static_cast<uint64_t>(id)]);
        tokens.push_back(0);
      }
      ++tokens.back();
    }
  }
};

// The routing weights of `rows`: fp32 [rows][top_k], and the ids.
struct Routing {
  std::vector<float> weights;
  std::vector<int64_t> ids;
};

Routing routed(const Engine& engine, const SparseBlock& block, const BFloat16Rows& rows) {
  const uint64_t columns = rows.columns();
  const MatrixShape shape{block.experts.size(), columns};
  if (block.router.size() != shape.rows * shape.columns) throw std::invalid_argument("a router has another shape");
  Routing routing{std::vector<float>(rows.rows * block.formula.top_k),
                  std::vector<int64_t>(rows.rows * block.formula.top_k)};
  std::vector<uint16_t> logits(rows.rows * shape.rows);
  route(WeightMatrix::bfloat16(block.router, shape), block.formula, rows.values.data(), rows.rows,
        {logits.data(), routing.weights.data(), routing.ids.data()}, simd::gemv_kernels(engine.instruction_set()));
  if (block.rounded_weights) {
    for (float& weight : routing.weights) weight = round_to_bfloat16(weight);
  }
  return routing;
}

// The gate's factor for each of `rows`.
std::vector<uint16_t> gate_factors(const Engine& engine, const SharedExpert& shared, const BFloat16Rows& rows) {
  const uint64_t columns = rows.columns();
  if (shared.gate.size() != columns || shared.gate_function.size() != uint64_t{1} << 16) {
    throw std::invalid_argument("the gate of a shared expert has another shape");
  }
  std::vector<uint16_t> factors(rows.rows);
  ComputeThreads caller_only(1);
  gemv({.matrix = WeightMatrix::bfloat16(shared.gate, {1, columns})},
       TokenInputs({rows.values.data(), columns}, rows.rows, columns, caller_only),
       {.bfloat16 = factors.data(), .stride = 1}, caller_only, simd::gemv_kernels(engine.instruction_set()));
  for (uint16_t& factor : factors) factor = shared.gate_function[factor];
  return factors;
}

void apply_gate(const Engine& engine, const SharedExpert& shared, const BFloat16Rows& rows, std::span<uint16_t> out) {
  if (shared.gate.empty()) return;
  const uint64_t columns = out.size() / rows.rows;
  const std::vector<uint16_t> factors = gate_factors(engine, shared, rows);
  for (uint64_t row = 0; row < rows.rows; ++row) scale(factors[row], out.subspan(row * columns, columns));
}

// Every expert as soon as it is resident, for the open request.
void compute_as_available(Engine& engine, const ExpertNetwork& network, std::span<const ExpertRows> experts,
                          const BFloat16Rows& x, std::span<uint16_t> out, const WaitingObserver& while_waiting) {
  const uint64_t columns = x.columns();
  std::vector<uint64_t> first_rows{0};
  for (const ExpertRows& expert : experts) first_rows.push_back(first_rows.back() + expert.numbers.size());
  for_each_expert(engine, while_waiting, [&](uint32_t position) {
    const ExpertRows& expert = experts[position];
    engine.feed_forward(expert.record, network, SelectedRows{x, expert.numbers},
                        out.subspan(first_rows[position] * columns, expert.numbers.size() * columns));
  });
}

// The experts' outputs, expert after expert, and those of the shared one, within one request.
void compute_networks(Engine& engine, const SparseBlock& block, const RoutedExperts& experts,
                      std::span<const uint64_t> tokens_of_rows, const BFloat16Rows& x, std::span<uint16_t> out,
                      std::span<uint16_t> shared_out, const WaitingObserver& while_waiting) {
  std::vector<ExpertRows> rows;
  for (size_t i = 0, first = 0; i < experts.records.size(); first += experts.tokens[i++]) {
    rows.push_back({experts.records[i], tokens_of_rows.subspan(first, experts.tokens[i])});
  }
  const DenseNetwork* const shared = block.shared ? &block.shared->network : nullptr;
  engine.begin_request(experts.records, HandOutOrder::as_available, experts.tokens);
  const EndOfRequest ending(engine);
  if (engine.take_all()) {
    engine.feed_forward_jointly(rows, block.network, x, out, shared, shared_out);
    return;
  }
  if (shared != nullptr) engine.feed_forward_step(*shared, x, shared_out);
  compute_as_available(engine, block.network, rows, x, out, while_waiting);
}

}  // namespace

void attend_in_layer(Engine& engine, const LayerNorms& norms, const AttentionLayer& attention, const BFloat16Rows& x,
                     const RotaryPositions& positions, const KeyValueCache& cache, uint16_t* sum, uint16_t* normed) {
  const uint64_t size = x.values.size();
  normalise(engine, norms.before_attention, x, normed);
  engine.attention_step(attention, {{normed, size}, x.rows}, x.rows, 1, positions, cache, {sum, size});
  add(x.values, {sum, size}, sum);
  normalise(engine, norms.before_feed_forward, {{sum, size}, x.rows}, normed);
}

void feed_forward_in_layer(Engine& engine, const DenseNetwork& network, const BFloat16Rows& normed, const uint16_t* sum,
                           uint16_t* out) {
  const uint64_t size = normed.values.size();
  engine.feed_forward_step(network, normed, {out, size});
  add({sum, size}, {out, size}, out);
}

void sparse_block_in_layer(Engine& engine, const SparseBlock& block, const BFloat16Rows& normed, const uint16_t* sum,
                           uint16_t* out, const WaitingObserver& while_waiting) {
  const uint64_t size = normed.values.size();
  const uint64_t columns = normed.columns();
  const Routing routing = routed(engine, block, normed);
  const RoutedExperts experts(routing.ids, block.experts);
  const ExpertTerms terms{routing.weights, experts.positions, block.formula.top_k};
  terms.check(normed.rows, columns, columns);
  ScratchPool::Lease outputs(engine.output_memory(), experts.positions.size() * columns);
  std::optional<ScratchPool::Lease> shared;
  std::span<uint16_t> shared_rows;
  if (block.shared) shared_rows = {shared.emplace(engine.output_memory(), size).values(), size};
  compute_networks(engine, block, experts, terms.tokens_of_rows(), normed,
                   {outputs.values(), experts.positions.size() * columns}, shared_rows, while_waiting);
  engine.combine(terms, outputs.values(), columns, out);
  if (block.shared) {
    apply_gate(engine, *block.shared, normed, shared_rows);
    add({out, size}, shared_rows, out);
  }
  add({sum, size}, {out, size}, out);
}

void compute_layers(Engine& engine, std::span<const LayerStep> layers, const BFloat16Rows& x, uint16_t* outs,
                    const WaitingObserver& while_waiting) {
  const uint64_t size = x.values.size();
  ScratchPool::Lease sum(engine.output_memory(), size);
  ScratchPool::Lease normed(engine.output_memory(), size);
  BFloat16Rows rows = x;
  for (const LayerStep& layer : layers) {
    attend_in_layer(engine, layer.norms, *layer.attention, rows, layer.positions, layer.cache, sum.values(),
                    normed.values());
    const BFloat16Rows between{{normed.values(), size}, x.rows};
    if (const auto* block = std::get_if<const SparseBlock*>(&layer.feed_forward)) {
      sparse_block_in_layer(engine, **block, between, sum.values(), outs, while_waiting);
    } else {
      feed_forward_in_layer(engine, *std::get<const DenseNetwork*>(layer.feed_forward), between, sum.values(), outs);
    }
    rows = {{outs, size}, x.rows};
    outs += size;
  }
}

}  // namespace zipmoe
