// Parts of a decoder layer.
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/engine_arrays.hpp"
#include "bindings/layer_parts.hpp"
#include "bindings/module.hpp"
#include "bindings/process_bound_engine.hpp"
#include "compute/gemv.hpp"
#include "compute/rms_norm.hpp"
#include "compute/routing.hpp"
#include "simd/instruction_set.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

// Gives the GIL up for the time of long work. Short work, as of one token, keeps it: whoever gives it up may wait for
// it afterwards for longer than the work takes.
class UnlockedIfLong {
 public:
  // `operations`: multiplications, about.
  explicit UnlockedIfLong(uint64_t operations) {
    constexpr uint64_t long_operations = uint64_t{1} << 20;  // tens of microseconds
    if (operations >= long_operations) release_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> release_;
};

void init_attention(HeldAttention* self, HeldProjection query, HeldProjection key, HeldProjection value,
                    HeldProjection output, const std::array<uint64_t, 3>& heads, float scale, HeldNorm query_norm,
                    HeldNorm key_norm) {
  const AttentionShape shape{heads[0], heads[1], heads[2], scale};
  shape.check();
  AttentionLayer layer{query.projection,
                       key.projection,
                       value.projection,
                       output.projection,
                       shape,
                       query_norm.norm(shape.head_dimension),
                       key_norm.norm(shape.head_dimension)};
  new (self) HeldAttention{{std::move(query), std::move(key), std::move(value), std::move(output)},
                           {std::move(query_norm), std::move(key_norm)},
                           std::move(layer)};
}

void init_network(HeldNetwork* self, HeldProjection gate, HeldProjection up, HeldProjection down,
                  const GatedActivation& activation) {
  DenseNetwork network{gate.projection, up.projection, down.projection, activation};
  new (self) HeldNetwork{{std::move(gate), std::move(up), std::move(down)}, std::move(network)};
}

void attention_step(const ProcessBoundEngine& engine, const HeldAttention& attention, Words2 x,
                    const std::optional<Angles>& cosines, const std::optional<Angles>& sines, Entries keys,
                    Entries values, uint64_t length, OutWords2 out) {
  const CacheEntries entries(attention.layer.shape, keys, values, length, x.shape(0));
  if (out.shape(0) % entries.sequences != 0) throw std::invalid_argument("the output has another number of rows");
  const RotaryPositions positions = rotary_positions(cosines, sines, entries.sequences, entries.tokens);
  nb::gil_scoped_release release;
  engine.get().attention_step(attention.layer, rows_of(x), entries.sequences, out.shape(0) / entries.sequences,
                              positions, entries.cache, {out.data(), out.size()});
}

void feed_forward_step(const ProcessBoundEngine& engine, const HeldNetwork& network, Words2 x, OutWords2 out) {
  nb::gil_scoped_release release;
  engine.get().feed_forward_step(network.network, rows_of(x), {out.data(), out.size()});
}

void check_norm(const Words2& x, const Vector& weight, const OutWords2& out) {
  if (x.shape(1) != weight.shape(0)) throw std::invalid_argument("a norm has one weight for every value");
  if (out.shape(0) != x.shape(0) || out.shape(1) != x.shape(1)) throw std::invalid_argument("the output's shape");
}

void normalise(Words2 x, Vector weight, float epsilon, OutWords2 out) {
  check_norm(x, weight, out);
  const UnlockedIfLong unlocked(x.size());
  rms_norm({weight.data(), epsilon}, x.data(), x.shape(0), x.shape(1), out.data(),
           simd::norm_kernels(best_instruction_set()));
}

void normalise_on_threads(const ProcessBoundEngine& engine, Words2 x, Vector weight, float epsilon, OutWords2 out) {
  check_norm(x, weight, out);
  nb::gil_scoped_release release;
  engine.get().normalise({weight.data(), epsilon}, rows_of(x), out.data());
}

void small_linear(Words2 weights, Words2 x, OutWords2 out, const BiasWords& bias) {
  const MatrixShape shape{weights.shape(0), weights.shape(1)};
  if (x.shape(1) != shape.columns) throw std::invalid_argument("x must have the matrix's columns");
  if (out.shape(0) != x.shape(0) || out.shape(1) != shape.rows) throw std::invalid_argument("the output's shape");
  if (bias && bias->size() != shape.rows) throw std::invalid_argument("a bias has one value for every row");
  const Projection projection{WeightMatrix::bfloat16({weights.data(), weights.size()}, shape),
                              bias ? bias->data() : nullptr};
  ComputeThreads caller_only(1);
  const UnlockedIfLong unlocked(x.shape(0) * weights.size());
  gemv(projection, TokenInputs({x.data(), shape.columns}, x.shape(0), shape.columns, caller_only),
       {.bfloat16 = out.data(), .stride = shape.rows}, caller_only, simd::gemv_kernels(best_instruction_set()));
}

using Weights = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Experts = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void route_rows(const RouterFormula& formula, Words2 x, Words2 matrix, OutWords2 logits, Weights weights,
                Experts experts) {
  const uint64_t rows = x.shape(0);
  if (x.shape(1) != matrix.shape(1)) throw std::invalid_argument("x must have the matrix's columns");
  if (logits.shape(0) != rows || logits.shape(1) != matrix.shape(0)) throw std::invalid_argument("the logits' shape");
  for (const auto& [first, second] :
       {std::pair{weights.shape(0), weights.shape(1)}, {experts.shape(0), experts.shape(1)}}) {
    if (first != rows || second != formula.top_k) throw std::invalid_argument("weights and experts are [rows, top_k]");
  }
  const MatrixShape shape{matrix.shape(0), matrix.shape(1)};
  const UnlockedIfLong unlocked(rows * matrix.size());
  route(WeightMatrix::bfloat16({matrix.data(), matrix.size()}, shape), formula, x.data(), rows,
        {logits.data(), weights.data(), experts.data()}, simd::gemv_kernels(best_instruction_set()));
}

}  // namespace

void bind_steps(nb::module_& module) {
  nb::class_<HeldProjection>(module, "DenseProjection")
      .def(
          "__init__",
          [](HeldProjection* self, std::vector<RecordIndex> blocks, BiasWords bias) {
            new (self) HeldProjection{{std::move(blocks), {}}, {std::move(bias)}};
            self->projection.bias = self->bias.values();
          },
          "blocks"_a, "bias"_a.noconvert() = nb::none(), "A dense matrix's records; bias BF16 patterns [rows].");
  nb::class_<HeldNorm>(module, "RmsNorm")
      .def(
          "__init__",
          [](HeldNorm* self, BiasWords weight, float epsilon) { new (self) HeldNorm{{std::move(weight)}, epsilon}; },
          "weight"_a.noconvert() = nb::none(), "epsilon"_a = 0.0f,
          "Weight and epsilon of an RMS norm; without a weight: none at all.");
  nb::class_<HeldAttention>(module, "AttentionLayer")
      .def("__init__", &init_attention, "query"_a, "key"_a, "value"_a, "output"_a, "heads"_a, "scale"_a, "query_norm"_a,
           "key_norm"_a, "heads: of queries, of keys and values, and their dimensions.");
  nb::class_<HeldNetwork>(module, "DenseNetwork")
      .def("__init__", &init_network, "gate"_a, "up"_a, "down"_a, "activation"_a);
  module.def(
      "attention_step", &attention_step, "engine"_a, "layer"_a, "x"_a.noconvert(), "cosines"_a.noconvert().none(),
      "sines"_a.noconvert().none(), "keys"_a.noconvert(), "values"_a.noconvert(), "length"_a, "out"_a.noconvert(),
      "Attention of the new tokens of each sequence, the rows of x (BF16 patterns [rows, hidden]): one behind "
      "`length` cached ones, or several behind none. Their own keys and values are written to the cache. `out` is of "
      "the last tokens of each sequence, as many as it has rows for.");
  module.def("feed_forward_step", &feed_forward_step, "engine"_a, "network"_a, "x"_a.noconvert(), "out"_a.noconvert(),
             "down(activation(gate x, up x)) of BF16 patterns [rows, hidden].");
  nb::class_<RouterFormula>(module, "RouterFormula")
      .def(
          "__init__",
          [](RouterFormula* self, const std::string& score, uint64_t top_k, bool normalised) {
            new (self) RouterFormula{parse_router_score(score), top_k, normalised};
          },
          "score"_a, "top_k"_a, "normalised"_a)
      .def_ro("top_k", &RouterFormula::top_k);
  module.def("route", &route_rows, "formula"_a, "x"_a.noconvert(), "matrix"_a.noconvert(), "logits"_a.noconvert(),
             "weights"_a.noconvert(), "experts"_a.noconvert(),
             "logits = x matrix^T (BF16 patterns), the scores (fp32) and ids (int64) of the top_k largest.");
  module.def("small_linear", &small_linear, "weights"_a.noconvert(), "x"_a.noconvert(), "out"_a.noconvert(),
             "bias"_a.noconvert() = nb::none(), "out = x weights^T (+ bias) of BF16 patterns, on the calling thread.");
  module.def("rms_norm", &normalise, "x"_a.noconvert(), "weight"_a.noconvert(), "epsilon"_a, "out"_a.noconvert(),
             "out = x * weight / sqrt(mean(x^2) + epsilon) of BF16 patterns [rows, size], rounded once.");
  module.attr("norm_values_for_threads") = kNormValuesForThreads;
  module.def("rms_norm_on_threads", &normalise_on_threads, "engine"_a, "x"_a.noconvert(), "weight"_a.noconvert(),
             "epsilon"_a, "out"_a.noconvert(), "The same on the engine's threads, for many rows.");
}

}  // namespace zipmoe
