// Python face of the computing parts: matrix-vector products and experts' networks on weights as they lie in memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/module.hpp"
#include "compute/bfloat16.hpp"
#include "compute/expert_feed_forward.hpp"
#include "compute/gemv.hpp"
#include "simd/instruction_set.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

template <typename Element, int dimensions>
using Array = nb::ndarray<Element, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
using Section = Array<const uint8_t, 1>;
using Words = Array<const uint16_t, 2>;
using Bias = std::optional<Array<const uint16_t, 1>>;
using Output = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// An FX3 section (uint8) or BF16 patterns (uint16, without dimensions); rows, columns, bias.
using MatrixTuple =
    std::tuple<nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>, uint64_t, uint64_t, Bias>;
// Matrices, x, out.
using ExpertTuple = std::tuple<std::vector<MatrixTuple>, Words, Output>;

InstructionSet instruction_set_or_best(const std::string& text) {
  return text.empty() ? best_instruction_set() : parse_instruction_set(text);
}

Projection with_bias(const WeightMatrix& matrix, const Bias& bias) {
  if (bias && bias->size() != matrix.shape().rows) throw std::invalid_argument("a bias has one value for every row");
  return {matrix, bias ? bias->data() : nullptr};
}

GemvOutput output_of(const Output& out, uint64_t tokens, uint64_t rows) {
  if (out.shape(0) != tokens || out.shape(1) != rows) {
    throw std::invalid_argument("the output must have shape (tokens, rows) = (" + std::to_string(tokens) + ", " +
                                std::to_string(rows) + ")");
  }
  if (out.dtype() == nb::dtype<float>()) return {.float32 = static_cast<float*>(out.data()), .stride = rows};
  if (out.dtype() == nb::dtype<uint16_t>()) return {.bfloat16 = static_cast<uint16_t*>(out.data()), .stride = rows};
  throw std::invalid_argument("the output must be float32, or uint16 for BF16 patterns");
}

void run_gemv(const WeightMatrix& matrix, const Words& x, const Output& out, ComputeThreads& threads, const Bias& bias,
              const std::string& instruction_set) {
  const Projection projection = with_bias(matrix, bias);
  const MatrixShape shape = matrix.shape();
  if (x.shape(1) != shape.columns) throw std::invalid_argument("x must have the matrix's columns");
  const GemvOutput output = output_of(out, x.shape(0), shape.rows);
  const simd::GemvKernels& kernels = simd::gemv_kernels(instruction_set_or_best(instruction_set));
  nb::gil_scoped_release unlocked;
  const TokenInputs inputs({x.data(), shape.columns}, x.shape(0), shape.columns, threads);
  gemv(projection, inputs, output, threads, kernels);
}

void fx3_gemv(const Section& section, uint64_t rows, uint64_t columns, const Words& x, const Output& out,
              ComputeThreads& threads, const Bias& bias, const std::string& instruction_set) {
  const WeightMatrix matrix = WeightMatrix::fx3(std::span(section.data(), section.size()), {rows, columns});
  run_gemv(matrix, x, out, threads, bias, instruction_set);
}

void bfloat16_gemv(const Words& weights, const Words& x, const Output& out, ComputeThreads& threads, const Bias& bias,
                   const std::string& instruction_set) {
  const MatrixShape shape{weights.shape(0), weights.shape(1)};
  run_gemv(WeightMatrix::bfloat16(std::span(weights.data(), weights.size()), shape), x, out, threads, bias,
           instruction_set);
}

Projection projection_of(const MatrixTuple& tuple) {
  const auto& [bytes, rows, columns, bias] = tuple;
  if (bytes.dtype() == nb::dtype<uint8_t>()) {
    return with_bias(
        WeightMatrix::fx3(std::span(static_cast<const uint8_t*>(bytes.data()), bytes.size()), {rows, columns}), bias);
  }
  if (bytes.dtype() == nb::dtype<uint16_t>()) {
    return with_bias(
        WeightMatrix::bfloat16(std::span(static_cast<const uint16_t*>(bytes.data()), bytes.size()), {rows, columns}),
        bias);
  }
  throw std::invalid_argument("a matrix is an FX3 section (uint8) or BF16 patterns (uint16)");
}

ExpertFeedForward expert_of(const ExpertTuple& tuple) {
  const auto& [matrices, x, out] = tuple;
  if (matrices.size() != 2 && matrices.size() != 3) throw std::invalid_argument("an expert has two or three matrices");
  const uint64_t tokens = x.shape(0);
  Projection down = projection_of(matrices.back());
  ExpertFeedForward expert{
      .first = projection_of(matrices.front()),
      .up = std::nullopt,
      .down = down,
      .x = {x.data(), x.shape(1)},
      .tokens = tokens,
      .output = output_of(out, tokens, down.matrix.shape().rows),
  };
  if (matrices.size() == 3) expert.up = projection_of(matrices[1]);
  if (x.shape(1) != expert.first.matrix.shape().columns) {
    throw std::invalid_argument("x must have the columns of the first matrix");
  }
  return expert;
}

void run_experts(const std::vector<ExpertTuple>& tuples, const GatedActivation& activation, ComputeThreads& threads,
                 const std::string& instruction_set) {
  std::vector<ExpertFeedForward> experts;
  experts.reserve(tuples.size());
  for (const ExpertTuple& tuple : tuples) experts.push_back(expert_of(tuple));
  const simd::GemvKernels& kernels = simd::gemv_kernels(instruction_set_or_best(instruction_set));
  nb::gil_scoped_release unlocked;
  compute_experts(experts, activation, threads, kernels);
}

void activate_array(const std::string& function, float sigmoid_scale, Array<float, 1> values) {
  const ActivationFunction parsed = parse_activation_function(function);
  nb::gil_scoped_release unlocked;
  activate(parsed, sigmoid_scale, values.data(), values.size());
}

// Calls function(gate, up, length, out) for runs of the values of each row.
template <typename Value, typename Function>
void for_each_run(const GatedActivation& self, const Words& values, Array<Value, 2> out, const Function& function) {
  const uint64_t rows = values.shape(0);
  const uint64_t columns = values.shape(1);
  const uint64_t count = self.layout == GateLayout::none ? columns : columns / 2;
  if (out.shape(0) != rows || out.shape(1) != count || (self.layout != GateLayout::none && columns % 2 != 0)) {
    throw std::invalid_argument("the output must have one value for every activation");
  }
  nb::gil_scoped_release unlocked;
  constexpr uint64_t length_max = 128;
  std::array<float, length_max> gate;
  std::array<float, length_max> up;
  for (uint64_t row = 0; row < rows; ++row) {
    const uint16_t* from = values.data() + row * columns;
    for (uint64_t begin = 0; begin < count; begin += length_max) {
      const uint64_t length = std::min(count - begin, length_max);
      for (uint64_t i = 0; i < length; ++i) {
        const uint64_t at = begin + i;
        const bool interleaved = self.layout == GateLayout::interleaved;
        gate[i] = bfloat16_to_float(from[interleaved ? 2 * at : at]);
        up[i] = bfloat16_to_float(from[self.layout == GateLayout::none ? at : interleaved ? 2 * at + 1 : count + at]);
      }
      function(gate.data(), up.data(), length, out.data() + row * count + begin);
    }
  }
}

void apply_activation(const GatedActivation& self, const Words& values, Array<uint16_t, 2> out) {
  const simd::Gate kernel = simd::gemv_kernels(instruction_set_or_best("")).gate;
  for_each_run(self, values, out, [&](const float* gate, const float* up, uint64_t length, uint16_t* to) {
    self.apply(gate, up, length, to, kernel);
  });
}

void evaluate_activation(const GatedActivation& self, const Words& values, Array<float, 2> out) {
  for_each_run(self, values, out, [&](const float* gate, const float* up, uint64_t length, float* to) {
    self.evaluate(gate, up, length, to);
  });
}

}  // namespace

void bind_compute(nb::module_& module) {
  module.attr("GEMV_TOKENS_MAX") = simd::kGemvTokensMax;
  module.def(
      "gemv_instruction_set",
      [](const std::string& instruction_set) {
        return std::string(name(simd::gemv_instruction_set(instruction_set_or_best(instruction_set))));
      },
      "instruction_set"_a = "", "The set whose kernels run: avx512 needs AVX512-BF16, without it avx2 is used.");
  nb::class_<ComputeThreads>(module, "ComputeThreads",
                             "Threads (the caller's among them) that share short computing steps, and sleep otherwise.")
      .def(
          "__init__",
          [](ComputeThreads* self, uint32_t threads, uint32_t spin_microseconds) {
            new (self) ComputeThreads(threads, std::chrono::microseconds(spin_microseconds));
          },
          "threads"_a, "spin_microseconds"_a = 200)
      .def_prop_ro("threads", &ComputeThreads::threads);
  nb::class_<GatedActivation>(module, "GatedActivation",
                              "What lies between the matrices of a feed-forward network (docs/compute.md).")
      .def(
          "__init__",
          [](GatedActivation* self, const std::string& function, const std::string& layout, float sigmoid_scale,
             float limit, bool limit_activated, float up_offset, bool rounds_between) {
            new (self) GatedActivation{parse_activation_function(function),
                                       parse_gate_layout(layout),
                                       sigmoid_scale,
                                       limit,
                                       limit_activated,
                                       up_offset,
                                       rounds_between};
          },
          "function"_a, "layout"_a, nb::kw_only(), "sigmoid_scale"_a = 1.0f,
          "limit"_a = std::numeric_limits<float>::infinity(), "limit_activated"_a = false, "up_offset"_a = 0.0f,
          "rounds_between"_a = true,
          "function: silu, gelu, gelu_tanh, relu, relu2, identity; layout: none, halves, interleaved.")
      .def("apply", apply_activation, "values"_a.noconvert(), "out"_a.noconvert(),
           "out [rows, n] = the activation of values [rows, n], with a gate [rows, 2 n]; BF16 patterns (uint16).")
      .def("evaluate", evaluate_activation, "values"_a.noconvert(), "out"_a.noconvert(),
           "The same without any rounding to BF16; out: float32.");
  module.def("activate", activate_array, "function"_a, "sigmoid_scale"_a, "values"_a.noconvert(),
             "Applies an activation function in place to values (float32 [n]).");
  module.def("fx3_gemv", fx3_gemv, "section"_a.noconvert(), "rows"_a, "columns"_a, "x"_a.noconvert(),
             "out"_a.noconvert(), "threads"_a, nb::kw_only(), "bias"_a.noconvert() = nb::none(),
             "instruction_set"_a = "",
             "out[t] = W x[t] (+ bias) for an FX3 section that is known to be intact; x: BF16 patterns (uint16 "
             "[tokens, columns]); out: float32 or uint16 (BF16, nearest even) [tokens, rows]. Raises ValueError.");
  module.def("bfloat16_gemv", bfloat16_gemv, "weights"_a.noconvert(), "x"_a.noconvert(), "out"_a.noconvert(),
             "threads"_a, nb::kw_only(), "bias"_a.noconvert() = nb::none(), "instruction_set"_a = "",
             "The same bits as fx3_gemv, for the BF16 patterns themselves (uint16 [rows, columns]).");
  module.def(
      "compute_experts", run_experts, "experts"_a, "activation"_a, "threads"_a, nb::kw_only(), "instruction_set"_a = "",
      "Feed-forward networks of experts: ([(FX3 section or flat BF16 patterns, rows, columns, bias or None)], x, "
      "out) each, with the matrices gate_up, down or gate, up, down or up, down. Raises ValueError.");
}

}  // namespace zipmoe
