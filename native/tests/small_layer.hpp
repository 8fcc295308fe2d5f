// Tests of layer steps share the parts of a small decoder layer, and its results put together part by part.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <utility>

#include "compute/bfloat16.hpp"
#include "compute/routing.hpp"
#include "runtime/layer_step.hpp"
#include "tests/gaussian_words.hpp"
#include "tests/packed_model.hpp"
#include "tests/stepped_engine.hpp"

namespace zipmoe {

enum class Shared : uint8_t { none, ungated, gated };

// Eight experts, and two dense matrices that serve as all the others.
struct SmallLayer {
  static constexpr uint64_t kHidden = kShapes[0].columns;
  static constexpr uint32_t kExperts = 8;
  static constexpr RecordIndex kFirst = kExperts;  // the dense matrices, hidden x hidden each
  static constexpr RecordIndex kSecond = kExperts + 1;
  static constexpr uint32_t kGatePosition = 5;  // and the last one: the gate adds these two values of a row

  explicit SmallLayer(const std::string& codec = "fx3") : model(codec, kExperts, 1, {kHidden, kHidden}) {
    gate[kGatePosition] = gate.back() = float_to_bfloat16(1.0f);
    for (uint32_t i = 0; i < gate_function.size(); ++i) {
      const float value = bfloat16_to_float(static_cast<uint16_t>(i));
      gate_function[i] = float_to_bfloat16(value > 0 ? 0.75f : -1.0f / 3 * value);
    }
  }

  DenseNetwork network() const {
    return {.gate = {{kSecond}, {}}, .up = {{kFirst}, {}}, .down = {{kFirst}, {}}, .activation = {}};
  }
  SparseBlock block(Shared shared, uint64_t top_k = 3) const {
    SparseBlock result{
        .formula = {.score = RouterScore::softmax, .top_k = top_k, .normalised = false},
        .router = router,
        .rounded_weights = false,
        .experts = {3, 0, 7, 1, 6, 2, 5, 4},
        .network = {.first = 0, .up = std::nullopt, .down = 1, .activation = {}},
        .shared = {},
    };
    if (shared == Shared::ungated) result.shared = {network(), {}, {}};
    if (shared == Shared::gated) result.shared = {network(), gate, gate_function};
    return result;
  }

  PackedModel model;
  Words router = gaussian(kExperts * kHidden, 11, 0.0f, 0.2f);
  Words gate = Words(kHidden);
  Words gate_function = Words(uint64_t{1} << 16);
};

// An engine, and the reader whose reads are carried out at once, or when the test says so.
struct SteppedLayer {
  explicit SteppedLayer(const SmallLayer& layer, uint32_t slots = SmallLayer::kExperts) {
    auto owned = std::make_unique<SteppedReader>(layer.model);
    reader = owned.get();
    engine = std::make_unique<Engine>(layer.model.table(), layer.model.options(slots), std::move(owned));
    load_dense(*engine);
  }
  SteppedReader* reader = nullptr;
  std::unique_ptr<Engine> engine;
};

// Hands out all experts of the open request; `use` is told of each by its position.
template <typename Use>
void hand_out(Engine& engine, const Use& use) {
  for (;;) {
    const RequestStep step = engine.next_expert(std::chrono::milliseconds(1000));
    if (step.kind == RequestStep::Kind::finished) return;
    if (step.kind == RequestStep::Kind::record) use(step.position);
  }
}

inline void make_resident(Engine& engine, const std::vector<RecordIndex>& records) {
  engine.begin_request(records, HandOutOrder::as_available);
  hand_out(engine, [](uint32_t) {});
  engine.end_request();
}

// No request is open, and nobody of the one pool is pinned.
inline void check_at_rest(Engine& engine, uint32_t slots) {
  EXPECT_ERROR(std::logic_error, engine.next_expert(std::chrono::milliseconds(0)));
  engine.resize_pool(0, slots);  // throws where somebody is pinned
}

inline Words sums_of(const Words& a, const Words& b) {
  CHECK(a.size() == b.size());
  Words out;
  for (size_t i = 0; i < a.size(); ++i) {
    out.push_back(float_to_bfloat16(bfloat16_to_float(a[i]) + bfloat16_to_float(b[i])));
  }
  return out;
}

// Which rows go to which expert, by id; positions in the flattened choice.
struct Choice {
  std::vector<float> weights;
  std::vector<int64_t> ids;
  std::map<int64_t, std::vector<int64_t>> positions_of;

  Choice(const SparseBlock& block, const Words& normed, uint64_t rows)
      : weights(rows * block.formula.top_k), ids(weights.size()) {
    Words logits(rows * block.experts.size());
    route(WeightMatrix::bfloat16(block.router, {block.experts.size(), normed.size() / rows}), block.formula,
          normed.data(), rows, {logits.data(), weights.data(), ids.data()}, simd::gemv_kernels(InstructionSet::scalar));
    for (size_t i = 0; i < ids.size(); ++i) positions_of[ids[i]].push_back(static_cast<int64_t>(i));
    if (block.rounded_weights) {
      for (float& weight : weights) weight = round_to_bfloat16(weight);
    }
  }
  std::vector<RecordIndex> records(const SparseBlock& block) const {
    std::vector<RecordIndex> result;
    for (const auto& [id, positions] : positions_of) result.push_back(block.experts[static_cast<size_t>(id)]);
    return result;
  }
};

// What sparse_block_in_layer promises, from calls of the engine that compute one part each.
inline Words sparse_block_by_parts(Engine& engine, const SparseBlock& block, const Words& normed, uint64_t rows,
                                   const Words& sum) {
  const uint64_t columns = normed.size() / rows;
  const BFloat16Rows x{normed, rows};
  const Choice choice(block, normed, rows);
  std::vector<Words> outputs;
  std::vector<int64_t> positions;
  engine.begin_request(choice.records(block), HandOutOrder::as_available);
  for (const auto& [id, of_expert] : choice.positions_of) outputs.emplace_back(of_expert.size() * columns);
  hand_out(engine, [&](uint32_t position) {
    const auto& [id, of_expert] = *std::next(choice.positions_of.begin(), position);
    std::vector<uint64_t> numbers;
    for (const int64_t at : of_expert) numbers.push_back(static_cast<uint64_t>(at) / block.formula.top_k);
    engine.feed_forward(block.experts[static_cast<size_t>(id)], block.network, SelectedRows{x, numbers},
                        outputs[position]);
  });
  engine.end_request();
  Words rows_of_experts;
  for (const Words& output : outputs) rows_of_experts.insert(rows_of_experts.end(), output.begin(), output.end());
  for (const auto& [id, of_expert] : choice.positions_of) {
    positions.insert(positions.end(), of_expert.begin(), of_expert.end());
  }
  Words out(normed.size());
  engine.combine({choice.weights, positions, block.formula.top_k}, rows_of_experts.data(), columns, out.data());
  if (block.shared) {
    Words shared(normed.size());
    engine.feed_forward_step(block.shared->network, x, shared);
    for (size_t i = 0; i < shared.size() && !block.shared->gate.empty(); ++i) {
      const uint16_t* row = normed.data() + i / columns * columns;
      const uint16_t product =
          float_to_bfloat16(bfloat16_to_float(row[SmallLayer::kGatePosition]) + bfloat16_to_float(row[columns - 1]));
      const float factor = bfloat16_to_float(block.shared->gate_function[product]);
      shared[i] = float_to_bfloat16(factor * bfloat16_to_float(shared[i]));
    }
    out = sums_of(out, shared);
  }
  return sums_of(sum, out);
}

}  // namespace zipmoe
