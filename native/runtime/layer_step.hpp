// A decoder layer for one new token of each sequence: h = x + attention(norm(x)), then h + feed_forward(norm(h)), with
// every value between two parts rounded to BF16, as where the parts are calls of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "compute/rms_norm.hpp"
#include "compute/routing.hpp"
#include "runtime/hand_out.hpp"

namespace zipmoe {

// The expert of all tokens. With a gate its output is multiplied with function(gate x), both rounded to BF16.
struct SharedExpert {
  DenseNetwork network;
  std::span<const uint16_t> gate;           // BF16 [hidden]; empty: none
  std::span<const uint16_t> gate_function;  // BF16 [65536]: its value for every BF16 pattern
};

struct SparseBlock {
  RouterFormula formula;
  std::span<const uint16_t> router;  // BF16 [experts][hidden]
  bool rounded_weights = false;      // the router's weights are rounded to BF16
  std::vector<RecordIndex> experts;  // by id
  ExpertNetwork network;
  std::optional<SharedExpert> shared;
};

struct LayerNorms {
  RmsNorm before_attention;
  RmsNorm before_feed_forward;
};

// `sum` = x + attention(norm(x)) and `normed` = norm(sum), BF16, the shape of x: one token of each sequence, whose keys
// and values are written behind the cached ones. Here and below, no result shares memory with an input. Throws as
// Engine::attention_step.
void attend_in_layer(Engine& engine, const LayerNorms& norms, const AttentionLayer& attention, const BFloat16Rows& x,
                     const RotaryPositions& positions, const KeyValueCache& cache, uint16_t* sum, uint16_t* normed);

// out = sum + network(normed), BF16, the shape of `normed`. Throws as Engine::feed_forward_step.
void feed_forward_in_layer(Engine& engine, const DenseNetwork& network, const BFloat16Rows& normed, const uint16_t* sum,
                           uint16_t* out);

// out = sum + (experts(normed) + shared(normed)), alike. One request: if all its experts are in memory (no pools), they
// and the shared one are computed together; else the shared one during the first reads, then each as soon as it is
// there. Throws what a request throws; std::invalid_argument for a block of another shape than the rows.
void sparse_block_in_layer(Engine& engine, const SparseBlock& block, const BFloat16Rows& normed, const uint16_t* sum,
                           uint16_t* out, const WaitingObserver& while_waiting);

// What a layer computes with; all of it must stay.
struct LayerStep {
  LayerNorms norms;
  const AttentionLayer* attention = nullptr;
  RotaryPositions positions;
  KeyValueCache cache;
  std::variant<const DenseNetwork*, const SparseBlock*> feed_forward;
};

// Layers one after the other: the first one's x, then what the one before has given. outs BF16 [layers][the shape of
// x]. Throws as the parts.
void compute_layers(Engine& engine, std::span<const LayerStep> layers, const BFloat16Rows& x, uint16_t* outs,
                    const WaitingObserver& while_waiting);

}  // namespace zipmoe
