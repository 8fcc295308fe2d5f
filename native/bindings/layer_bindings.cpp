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

LayerStep prepared(const HeldNorms& norms, const HeldAttention& attention, const Words2& x,
                   const std::optional<Angles>& cosines, const std::optional<Angles>& sines, const Entries& keys,
                   const Entries& values, uint64_t length) {
  const CacheEntries entries(attention.layer.shape, keys, values, length, x.shape(0));
  if (entries.sequences != x.shape(0)) throw std::invalid_argument("every sequence has one new token");
  return {.norms = norms.norms(x.shape(1)),
          .attention = &attention.layer,
          .positions = rotary_positions(cosines, sines, x.shape(0), 1),
          .cache = entries.cache,
          .feed_forward = {}};
}

void attention_in_layer(const ProcessBoundEngine& engine, const HeldNorms& norms, const HeldAttention& attention,
                        Words2 x, const std::optional<Angles>& cosines, const std::optional<Angles>& sines,
                        Entries keys, Entries values, uint64_t length, OutWords2 sum, OutWords2 normed) {
  const LayerStep layer = prepared(norms, attention, x, cosines, sines, keys, values, length);
  for (const OutWords2* out : {&sum, &normed}) {
    if (out->shape(0) != x.shape(0) || out->shape(1) != x.shape(1)) {
      throw std::invalid_argument("the outputs have the input's shape");
    }
  }
  nb::gil_scoped_release release;
  attend_in_layer(engine.get(), layer.norms, *layer.attention, rows_of(x), layer.positions, layer.cache, sum.data(),
                  normed.data());
}

using LayerOutputs = nb::ndarray<uint16_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using LayerTuple = nb::typed<nb::tuple, HeldNorms, HeldAttention, nb::object, Entries, Entries, uint64_t>;

// The arrays of `layers` live as long as their tuples, which the caller holds.
void layers_step(const ProcessBoundEngine& engine, const std::vector<LayerTuple>& layers, Words2 x,
                 const std::optional<Angles>& cosines, const std::optional<Angles>& sines, LayerOutputs outs) {
  if (outs.shape(0) != layers.size() || outs.shape(1) != x.shape(0) || outs.shape(2) != x.shape(1)) {
    throw std::invalid_argument("every layer's output has the input's shape");
  }
  std::vector<LayerStep> steps;
  for (const LayerTuple& layer : layers) {
    if (layer.size() != 6) throw std::invalid_argument("a layer is six parts");
    steps.push_back(prepared(nb::cast<const HeldNorms&>(layer[0]), nb::cast<const HeldAttention&>(layer[1]), x, cosines,
                             sines, nb::cast<Entries>(layer[3], false), nb::cast<Entries>(layer[4], false),
                             nb::cast<uint64_t>(layer[5])));
    if (nb::isinstance<HeldBlock>(layer[2])) {
      steps.back().feed_forward = &nb::cast<const HeldBlock&>(layer[2]).block;
    } else if (nb::isinstance<HeldNetwork>(layer[2])) {
      steps.back().feed_forward = &nb::cast<const HeldNetwork&>(layer[2]).network;
    } else {
      throw nb::type_error("a layer's second half is a DenseNetwork or a SparseBlock");
    }
  }
  nb::gil_scoped_release release;
  compute_layers(engine.get(), steps, rows_of(x), outs.data(), check_signals);
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
  module.def("layers_step", &layers_step, "engine"_a, "layers"_a, "x"_a.noconvert(), "cosines"_a.noconvert(),
             "sines"_a.noconvert(), "outs"_a.noconvert(),
             "Whole layers, one after the other: (norms, attention, DenseNetwork or SparseBlock, keys, values, cached "
             "tokens) of each; outs: BF16 patterns [layers, sequences, hidden].");
}

}  // namespace zipmoe
