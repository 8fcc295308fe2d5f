// Attention of prompts without an engine, as tests and benchmarks call it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/module.hpp"
#include "compute/prompt_attention.hpp"
#include "simd/instruction_set.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

template <typename Word>
using Heads = nb::ndarray<Word, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

using Angles = std::optional<nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;

InstructionSet instruction_set_or_best(const std::string& text) {
  return text.empty() ? best_instruction_set() : parse_instruction_set(text);
}

bool attends_prompts(const std::string& instruction_set) {
  return simd::prompt_attention(instruction_set_or_best(instruction_set)) != nullptr;
}

void attend_arrays(Heads<const uint16_t> queries, Heads<const uint16_t> keys, Heads<const uint16_t> values, float scale,
                   Heads<uint16_t> cached_keys, Heads<uint16_t> cached_values, Heads<uint16_t> out,
                   ComputeThreads& threads, const Angles& cosines, const Angles& sines,
                   const std::string& instruction_set) {
  const auto same = [](const auto& one, const auto& other) {
    for (size_t i = 0; i < 4; ++i) {
      if (one.shape(i) != other.shape(i)) return false;
    }
    return true;
  };
  const uint64_t sequences = queries.shape(0);
  const uint64_t tokens = queries.shape(1);
  if (!same(out, queries) || !same(values, keys) || !same(cached_values, cached_keys) || keys.shape(0) != sequences ||
      keys.shape(1) != tokens || keys.shape(3) != queries.shape(3) || cached_keys.shape(0) != sequences ||
      cached_keys.shape(1) != keys.shape(2) || cached_keys.shape(3) != keys.shape(3)) {
    throw std::invalid_argument(
        "queries, keys and values are [sequences, tokens, heads, dimensions], the cache's [sequences, heads, capacity, "
        "dimensions]");
  }
  RotaryPositions positions;
  if (cosines || sines) {
    if (!cosines || !sines || cosines->shape(0) != tokens || sines->shape(0) != tokens ||
        cosines->shape(1) != sines->shape(1)) {
      throw std::invalid_argument("cosines and sines are [tokens, dimensions]");
    }
    positions = {cosines->data(), sines->data(), cosines->shape(1), 0};
  }
  const AttentionShape shape{queries.shape(2), keys.shape(2), queries.shape(3), scale};
  const KeyValueCache cache{cached_keys.data(), cached_values.data(), 0, cached_keys.shape(2)};
  const PromptInputs inputs{sequences, tokens, queries.data(), keys.data(), values.data(), {}, {}};
  const simd::PromptAttention kernel = simd::prompt_attention(instruction_set_or_best(instruction_set));
  nb::gil_scoped_release unlocked;
  attend_prompt(shape, inputs, positions, cache, out.data(), threads, kernel);
}

}  // namespace

void bind_prompts(nb::module_& module) {
  module.def("attends_prompts", &attends_prompts, "instruction_set"_a = "",
             "Whether there is a kernel for several new tokens of a sequence.");
  module.def(
      "attend_prompt", &attend_arrays, "queries"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(), "scale"_a,
      "cached_keys"_a.noconvert(), "cached_values"_a.noconvert(), "out"_a.noconvert(), "threads"_a, nb::kw_only(),
      "cosines"_a.noconvert() = nb::none(), "sines"_a.noconvert() = nb::none(), "instruction_set"_a = "",
      "Causal attention of the tokens of each sequence: queries and out BF16 patterns [sequences, tokens, heads, "
      "dimensions], keys and values with their own heads, which are also written to the cache's buffers "
      "[sequences, heads, capacity, dimensions]. Rotated where cosines and sines [tokens, dimensions] are given.");
}

}  // namespace zipmoe
