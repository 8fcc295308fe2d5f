// Activation functions of feed-forward networks, from BF16 to BF16, in one portable implementation: the same bits on
// every machine.
#pragma once
#include <cstdint>
#include <limits>
#include <string_view>

#include "simd/activation_kernels.hpp"

namespace zipmoe {

// "silu", "gelu", "gelu_tanh", "relu", "relu2", "identity". Throws std::invalid_argument for another name.
ActivationFunction parse_activation_function(std::string_view text);

enum class GateLayout : uint8_t {
  none,         // f(up)
  halves,       // f(gate) * up, rows of the gate first
  interleaved,  // f(gate) * up, rows gate, up, gate, up, ...
};

// "none", "halves", "interleaved". Throws std::invalid_argument for another name.
GateLayout parse_gate_layout(std::string_view text);

// What lies between the first and the second matrix of a feed-forward network (Transformers: act_fn and _apply_gate).
struct GatedActivation {
  ActivationFunction function = ActivationFunction::silu;
  GateLayout layout = GateLayout::halves;
  float sigmoid_scale = 1.0f;                            // silu only
  float limit = std::numeric_limits<float>::infinity();  // gate is clamped to at most this, up to +- this
  bool limit_activated = false;                          // the limit is for f(gate) instead of gate
  float up_offset = 0.0f;                                // f(gate) * (up + up_offset)
  bool rounds_between = true;                            // to BF16 between the steps below, not at the end only

  bool operator==(const GatedActivation&) const = default;

  // out[i] for i < count. `gate` and `up` are fp32 sums, rounded to BF16 first; without a gate `up` alone is used. The
  // formulas above are computed in fp32; rounded to BF16 are f(gate), up + up_offset (both with rounds_between only)
  // and the product. Every kernel gives the same bits.
  void apply(const float* gate, const float* up, uint64_t count, uint16_t* out, simd::Gate kernel) const;

  // The function itself: the same formulas in fp32, without any rounding to BF16. Tells activations apart that BF16
  // cannot. `out` may be neither `gate` nor `up`.
  void evaluate(const float* gate, const float* up, uint64_t count, float* out) const;
};

// f of each value in fp32, in place, not rounded.
void activate(ActivationFunction function, float sigmoid_scale, float* values, uint64_t count);

// exp of each value in fp32, in place; 0 below -87.3.
void exponentials(float* values, uint64_t count);

// The same relative to the largest value, as a softmax needs it: exp(values[i] - largest). A NaN makes all of them NaN.
// `count` above 0.
void exponentials_of_scores(float* values, uint64_t count);

}  // namespace zipmoe
