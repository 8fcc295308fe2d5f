#include "compute/activation.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#define ZIPMOE_ACTIVATION_CODE
#include "simd/activation_body.hpp"

namespace zipmoe {
namespace {

template <typename Function>
void for_each(float* values, uint64_t count, const Function& function) {
  for (uint64_t i = 0; i < count; ++i) values[i] = function(values[i]);
}

template <typename Enum, size_t count>
Enum parse(std::string_view text, const std::array<std::string_view, count>& names, const char* what) {
  for (size_t i = 0; i < count; ++i) {
    if (names[i] == text) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("unknown " + std::string(what) + " '" + std::string(text) + "'");
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
  for_each(values, count, [=](float x) { return simd::activated(function, sigmoid_scale, x); });
}

void exponentials(float* values, uint64_t count) {
  for_each(values, count, [](float x) { return simd::exponential(x); });
}

void exponentials_of_scores(float* values, uint64_t count) {
  float largest = values[0];
  for (uint64_t i = 0; i < count; ++i) largest = values[i] > largest || values[i] != values[i] ? values[i] : largest;
  for (uint64_t i = 0; i < count; ++i) values[i] -= largest;
  exponentials(values, count);
}

void GatedActivation::apply(const float* gate, const float* up, uint64_t count, uint16_t* out,
                            simd::Gate kernel) const {
  kernel(simd::GateRun{
      .gate = layout == GateLayout::none ? nullptr : gate,
      .up = up,
      .count = count,
      .out = out,
      .function = function,
      .sigmoid_scale = sigmoid_scale,
      .limit = limit,
      .limit_activated = limit_activated,
      .up_offset = up_offset,
      .rounds_between = rounds_between,
  });
}

void GatedActivation::evaluate(const float* gate, const float* up, uint64_t count, float* out) const {
  const bool gated = layout != GateLayout::none;
  for (uint64_t i = 0; i < count; ++i) {
    const float value = gated ? gate[i] : up[i];
    out[i] = limit_activated ? value : simd::at_most(value, limit);
  }
  activate(function, sigmoid_scale, out, count);
  if (!gated) return;
  for (uint64_t i = 0; i < count; ++i) {
    const float bounded = limit_activated ? simd::at_most(out[i], limit) : out[i];
    out[i] = bounded * (simd::at_least(simd::at_most(up[i], limit), -limit) + up_offset);
  }
}

}  // namespace zipmoe
