// Loops without branches over fp32 values, which compilers turn into vector code of the baseline. CMakeLists.txt
// forbids the contraction of products and sums here: results must not depend on whether a machine has the instruction.
#include "compute/activation.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "compute/bfloat16.hpp"

namespace zipmoe {
namespace {

// exp(x) within 1e-7 of its value, 0 below -87.3 (no denormals), infinite above 88.7, NaN for NaN.
inline float exponential(float x) {
  constexpr float lowest = -87.33654f;
  constexpr float highest = 88.72283f;
  const float bounded = x < lowest ? lowest : (x > highest ? highest : x);
  constexpr float rounder = 0x1.8p23f;  // adding it rounds to an integer, which the low bits then hold
  const float shifted = bounded * 0x1.715476p0f + rounder;
  const float n = shifted - rounder;
  // ln 2 in two parts, the first with few enough digits that its product with n is exact.
  const float r = (bounded - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  float p = 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665895e-2f;
  p = p * r + 1.6666666e-1f;
  p = p * r + 0.5f;
  const float fraction = (p * r) * r + r + 1.0f;
  // 2^n in two factors, so that n = 128 is possible.
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(rounder);
  const int32_t half = exponent >> 1;
  const float first = std::bit_cast<float>((half + 127) << 23);
  const float second = std::bit_cast<float>((exponent - half + 127) << 23);
  const float result = fraction * first * second;
  const float above = x > highest ? std::bit_cast<float>(0x7F800000) : result;
  return x < lowest ? 0.0f : above;
}

// 1 + erf(x), with the relative accuracy of fp32 in the negative tail too. Polynomials: N. Juffa, erff with a maximum
// error of one unit in the last place (public posting).
inline float one_plus_erf(float x) {
  const float t = std::fabs(x);
  const float s = x * x;
  float tail = -1.72853470e-5f * t + 3.83197126e-4f;
  const float u = -3.88396438e-3f * t + 2.42546219e-2f;
  tail = tail * s + u;
  tail = tail * t - 1.06777877e-1f;
  tail = tail * t - 6.34846687e-1f;
  tail = tail * t - 1.28717512e-1f;
  tail = tail * t - t;
  const float complement = exponential(tail);  // 1 - erf(t)
  float core = -5.96761703e-4f;
  core = core * s + 4.99119423e-3f;
  core = core * s - 2.67681349e-2f;
  core = core * s + 1.12819925e-1f;
  core = core * s - 3.76125336e-1f;
  core = core * s + 1.28379166e-1f;
  core = core * x + x;
  const float outer = x < 0 ? complement : 2.0f - complement;
  return t > 0.927734375f ? outer : 1.0f + core;
}

// x sigmoid(z)
inline float gated_by_sigmoid(float x, float z) { return x / (1.0f + exponential(-z)); }

inline float gelu(float x) { return 0.5f * x * one_plus_erf(x * 0x1.6a09e6p-1f); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
inline float gelu_tanh(float x) { return gated_by_sigmoid(x, 2.0f * 0x1.988454p-1f * (x + 0.044715f * x * x * x)); }

template <typename Function>
void for_each(float* values, uint64_t count, const Function& function) {
  for (uint64_t i = 0; i < count; ++i) values[i] = function(values[i]);
}

// NaN stays NaN, as in Transformers.
inline float at_most(float value, float limit) { return value > limit ? limit : value; }
inline float at_least(float value, float limit) { return value < limit ? limit : value; }

template <typename Enum, size_t count>
Enum parse(std::string_view text, const std::array<std::string_view, count>& names, const char* what) {
  for (size_t i = 0; i < count; ++i) {
    if (names[i] == text) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("unknown " + std::string(what) + " '" + std::string(text) + "'");
}

using Values = std::array<float, kActivationsMax>;

// The formulas of GatedActivation, each step but the last followed by `round`.
template <typename Round>
void apply_formulas(const GatedActivation& activation, const float* gate, const float* up, uint64_t count, float* out,
                    const Round& round) {
  const bool gated = activation.layout != GateLayout::none;
  const float limit = activation.limit;
  Values activated;
  for (uint64_t i = 0; i < count; ++i) {
    const float value = gated ? gate[i] : up[i];
    activated[i] = activation.limit_activated ? value : at_most(value, limit);
  }
  activate(activation.function, activation.sigmoid_scale, activated.data(), count);
  for (uint64_t i = 0; i < count; ++i) activated[i] = round(activated[i]);
  if (!gated) {
    std::copy_n(activated.begin(), count, out);
    return;
  }
  for (uint64_t i = 0; i < count; ++i) {
    const float bounded = activation.limit_activated ? at_most(activated[i], limit) : activated[i];
    const float value = round(at_least(at_most(up[i], limit), -limit) + activation.up_offset);
    out[i] = bounded * value;
  }
}

}  // namespace

ActivationFunction parse_activation_function(std::string_view text) {
  static constexpr std::array<std::string_view, 6> names = {"silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"};
  return parse<ActivationFunction>(text, names, "activation function");
}

GateLayout parse_gate_layout(std::string_view text) {
  static constexpr std::array<std::string_view, 3> names = {"none", "halves", "interleaved"};
  return parse<GateLayout>(text, names, "gate layout");
}

void activate(ActivationFunction function, float sigmoid_scale, float* values, uint64_t count) {
  switch (function) {
    case ActivationFunction::silu:
      return for_each(values, count, [=](float x) { return gated_by_sigmoid(x, sigmoid_scale * x); });
    case ActivationFunction::gelu:
      return for_each(values, count, gelu);
    case ActivationFunction::gelu_tanh:
      return for_each(values, count, gelu_tanh);
    case ActivationFunction::relu:
      return for_each(values, count, [](float x) { return at_least(x, 0.0f); });
    case ActivationFunction::relu2:
      return for_each(values, count, [](float x) {
        const float positive = at_least(x, 0.0f);
        return positive * positive;
      });
    case ActivationFunction::identity:
      return;
  }
}

void exponentials(float* values, uint64_t count) { for_each(values, count, exponential); }

void exponentials_of_scores(float* values, uint64_t count) {
  float largest = values[0];
  for (uint64_t i = 0; i < count; ++i) largest = values[i] > largest || values[i] != values[i] ? values[i] : largest;
  for (uint64_t i = 0; i < count; ++i) values[i] -= largest;
  exponentials(values, count);
}

void GatedActivation::apply(const float* gate, const float* up, uint64_t count, uint16_t* out) const {
  Values values;
  if (rounds_between) {
    apply_formulas(*this, gate, up, count, values.data(), round_to_bfloat16);
  } else {
    evaluate(gate, up, count, values.data());
  }
  for (uint64_t i = 0; i < count; ++i) out[i] = float_to_bfloat16(values[i]);
}

void GatedActivation::evaluate(const float* gate, const float* up, uint64_t count, float* out) const {
  apply_formulas(*this, gate, up, count, out, [](float value) { return value; });
}

}  // namespace zipmoe
