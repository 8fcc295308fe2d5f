// Whole decoder layers, for one new token of each sequence.
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/engine_arrays.hpp"
#include "bindings/layer_parts.hpp"
#include "bindings/module.hpp"
#include "bindings/process_bound_engine.hpp"
#include "runtime/layer_step.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

struct HeldShared {
  HeldNetwork network;
  HeldVector gate;
  HeldVector gate_function;
};

struct HeldBlock {
  Words2 router;
  std::optional<HeldShared> shared;
  SparseBlock block;
};

void init_shared(HeldShared* self, const HeldNetwork& network, BiasWords gate, BiasWords gate_function) {
  if (gate.has_value() != gate_function.has_value()) throw std::invalid_argument("a gate has a function");
  new (self) HeldShared{network, {std::move(gate)}, {std::move(gate_function)}};
}

void init_block(HeldBlock* self, const RouterFormula& formula, Words2 router, bool rounded_weights,
                std::vector<RecordIndex> experts, const ExpertNetwork& network,
                const std::optional<HeldShared>& shared) {
  SparseBlock block{.formula = formula,
                    .router = {router.data(), router.size()},
                    .rounded_weights = rounded_weights,
                    .experts = std::move(experts),
                    .network = network,
                    .shared = {}};
  if (shared) block.shared = {shared->network.network, shared->gate.values(), shared->gate_function.values()};
  new (self) HeldBlock{std::move(router), shared, std::move(block)};
}

struct HeldNorms {
  HeldNorm before_attention;
  HeldNorm before_feed_forward;

  LayerNorms norms(uint64_t size) const {
    if (!before_attention.weight.array || !before_feed_forward.weight.array) {
      throw std::invalid_argument("a layer has two norms");
    }
    return {before_attention.norm(size), before_feed_forward.norm(size)};
  }
};

void init_norms(HeldNorms* self, HeldNorm before_attention, HeldNorm before_feed_forward) {
  new (self) HeldNorms{std::move(before_attention), std::move(before_feed_forward)};
}

// What is in every call: the layer's first half, and where both halves' results go.
struct LayerCall {
  const LayerNorms norms;
  const CacheEntries entries;
  const RotaryPositions positions;

  LayerCall(const HeldNorms& held, const HeldAttention& attention, const Words2& x,
            const std::optional<Angles>& cosines, const std::optional<Angles>& sines, const Entries& keys,
            const Entries& values, uint64_t length, const OutWords2& first, const OutWords2& second)
      : norms(held.norms(x.shape(1))),
        entries(attention.layer.shape, keys, values, length, x.shape(0)),
        positions(rotary_positions(cosines, sines, x.shape(0), 1)) {
    for (const OutWords2* out : {&first, &second}) {
      if (out->shape(0) != x.shape(0) || out->shape(1) != x.shape(1)) {
        throw std::invalid_argument("the outputs have the input's shape");
      }
    }
    if (entries.sequences != x.shape(0)) throw std::invalid_argument("every sequence has one new token");
  }
};

void attention_in_layer(const ProcessBoundEngine& engine, const HeldNorms& norms, const HeldAttention& attention,
                        Words2 x, const std::optional<Angles>& cosines, const std::optional<Angles>& sines,
                        Entries keys, Entries values, uint64_t length, OutWords2 sum, OutWords2 normed) {
  const LayerCall call(norms, attention, x, cosines, sines, keys, values, length, sum, normed);
  nb::gil_scoped_release release;
  attend_in_layer(engine.get(), call.norms, attention.layer, rows_of(x), call.positions, call.entries.cache, sum.data(),
                  normed.data());
}

// The whole layer; `feed_forward`(engine, normed, sum, out) is its second half, called without the GIL.
template <typename FeedForward>
void layer_step(const ProcessBoundEngine& engine, const HeldNorms& norms, const HeldAttention& attention,
                const Words2& x, const std::optional<Angles>& cosines, const std::optional<Angles>& sines,
                const Entries& keys, const Entries& values, uint64_t length, OutWords2& out,
                const FeedForward& feed_forward) {
  const LayerCall call(norms, attention, x, cosines, sines, keys, values, length, out, out);
  nb::gil_scoped_release release;
  Engine& native = engine.get();
  ScratchPool::Lease sum(native.output_memory(), x.size());
  ScratchPool::Lease normed(native.output_memory(), x.size());
  attend_in_layer(native, call.norms, attention.layer, rows_of(x), call.positions, call.entries.cache, sum.values(),
                  normed.values());
  feed_forward(native, BFloat16Rows{{normed.values(), x.size()}, x.shape(0)}, sum.values(), out.data());
}

void dense_layer_step(const ProcessBoundEngine& engine, const HeldNorms& norms, const HeldAttention& attention,
                      const HeldNetwork& network, Words2 x, const std::optional<Angles>& cosines,
                      const std::optional<Angles>& sines, Entries keys, Entries values, uint64_t length,
                      OutWords2 out) {
  layer_step(engine, norms, attention, x, cosines, sines, keys, values, length, out,
             [&](Engine& native, const BFloat16Rows& normed, const uint16_t* sum, uint16_t* to) {
               feed_forward_in_layer(native, network.network, normed, sum, to);
             });
}

void check_signals() {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void sparse_layer_step(const ProcessBoundEngine& engine, const HeldNorms& norms, const HeldAttention& attention,
                       const HeldBlock& block, Words2 x, const std::optional<Angles>& cosines,
                       const std::optional<Angles>& sines, Entries keys, Entries values, uint64_t length,
                       OutWords2 out) {
  layer_step(engine, norms, attention, x, cosines, sines, keys, values, length, out,
             [&](Engine& native, const BFloat16Rows& normed, const uint16_t* sum, uint16_t* to) {
               sparse_block_in_layer(native, block.block, normed, sum, to, check_signals);
             });
}

}  // namespace

void bind_layers(nb::module_& module) {
  nb::class_<HeldNorms>(module, "LayerNorms")
      .def("__init__", &init_norms, "before_attention"_a, "before_feed_forward"_a);
  nb::class_<HeldShared>(module, "SharedExpert")
      .def("__init__", &init_shared, "network"_a, "gate"_a.noconvert() = nb::none(),
           "gate_function"_a.noconvert() = nb::none(),
           "gate: BF16 patterns [hidden], whose product with a token, as BF16, is looked up in gate_function [65536].");
  nb::class_<HeldBlock>(module, "SparseBlock")
      .def("__init__", &init_block, "formula"_a, "router"_a.noconvert(), "rounded_weights"_a, "experts"_a, "network"_a,
           "shared"_a = nb::none(),
           "router: BF16 patterns [experts, hidden]; rounded_weights: to BF16; experts: records by id.");
  module.def("attention_in_layer", &attention_in_layer, "engine"_a, "norms"_a, "attention"_a, "x"_a.noconvert(),
             "cosines"_a.noconvert(), "sines"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(), "length"_a,
             "sum"_a.noconvert(), "normed"_a.noconvert(),
             "sum = x + attention(norm(x)) and normed = norm(sum), of BF16 patterns [sequences, hidden].");
  module.def("dense_layer_step", &dense_layer_step, "engine"_a, "norms"_a, "attention"_a, "network"_a,
             "x"_a.noconvert(), "cosines"_a.noconvert(), "sines"_a.noconvert(), "keys"_a.noconvert(),
             "values"_a.noconvert(), "length"_a, "out"_a.noconvert(), "The same, then sum + network(normed).");
  module.def("sparse_layer_step", &sparse_layer_step, "engine"_a, "norms"_a, "attention"_a, "block"_a,
             "x"_a.noconvert(), "cosines"_a.noconvert(), "sines"_a.noconvert(), "keys"_a.noconvert(),
             "values"_a.noconvert(), "length"_a, "out"_a.noconvert(), "The same, then sum + block(normed).");
}

}  // namespace zipmoe
