// The formulas of activation functions and gates, and the kernel of activation_kernels.hpp. Loops without branches over
// fp32 values, which the compiler turns into vector code for the instruction set of the translation unit that includes
// this; CMakeLists.txt forbids the contraction of products and sums there. ZIPMOE_ACTIVATION_CODE marks the functions
// (wide_code.hpp).
#pragma once
#include "simd/activation_kernels.hpp"

namespace zipmoe::simd {
namespace {

// exp(x) within 1e-7 of its value, 0 below -87.3 (no denormals), infinite above 88.7, NaN for NaN.
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float exponential(float x) {
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
  const int32_t exponent = __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, rounder);
  const int32_t half = exponent >> 1;
  const float first = __builtin_bit_cast(float, (half + 127) << 23);
  const float second = __builtin_bit_cast(float, (exponent - half + 127) << 23);
  const float result = fraction * first * second;
  const float above = x > highest ? __builtin_bit_cast(float, 0x7F800000) : result;
  return x < lowest ? 0.0f : above;
}

// 1 + erf(x), with the relative accuracy of fp32 in the negative tail too. Polynomials: N. Juffa, erff with a maximum
// error of one unit in the last place (public posting).
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float one_plus_erf(float x) {
  const float t = __builtin_fabsf(x);
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
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float gated_by_sigmoid(float x, float z) {
  return x / (1.0f + exponential(-z));
}

ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float gelu(float x) {
  return 0.5f * x * one_plus_erf(x * 0x1.6a09e6p-1f);
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float gelu_tanh(float x) {
  return gated_by_sigmoid(x, 2.0f * 0x1.988454p-1f * (x + 0.044715f * x * x * x));
}

// NaN stays NaN, as in Transformers.
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float at_most(float value, float limit) {
  return value > limit ? limit : value;
}
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float at_least(float value, float limit) {
  return value < limit ? limit : value;
}

// As compute/bfloat16.hpp: the BF16 pattern, and the same as fp32.
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) uint16_t to_bfloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0u : rounded);
}
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float rounded(float value) {
  return __builtin_bit_cast(float, (uint32_t)to_bfloat16(value) << 16);
}

// Rounded where the mask has all bits, as it is where it has none: compilers do not vectorise the choice by a bool.
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float rounded_if(uint32_t mask, float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return __builtin_bit_cast(float, (mask & __builtin_bit_cast(uint32_t, rounded(value))) | (~mask & bits));
}

// `function` is a constant of each caller.
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) float activated(const ActivationFunction function,
                                                                             float sigmoid_scale, float x) {
  switch (function) {
    case ActivationFunction::silu:
      return gated_by_sigmoid(x, sigmoid_scale * x);
    case ActivationFunction::gelu:
      return gelu(x);
    case ActivationFunction::gelu_tanh:
      return gelu_tanh(x);
    case ActivationFunction::relu:
      return at_least(x, 0.0f);
    case ActivationFunction::relu2:
      return at_least(x, 0.0f) * at_least(x, 0.0f);
    case ActivationFunction::identity:
      break;
  }
  return x;
}

// kGateBlock values. `function` and `gated` are constants of each caller.
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) void gate_block(const GateRun& run, const float* gate,
                                                                             const float* up, uint16_t* out,
                                                                             const ActivationFunction function,
                                                                             const bool gated) {
  const float limit = run.limit;
  const float limit_before = run.limit_activated ? __builtin_inff() : limit;
  const float limit_after = run.limit_activated ? limit : __builtin_inff();
  const float up_offset = run.up_offset;
  const float sigmoid_scale = run.sigmoid_scale;
  const uint32_t rounding = run.rounds_between ? ~0u : 0u;
  const float* const values = gated ? gate : up;
  for (uint64_t i = 0; i < kGateBlock; ++i) {
    const float value = activated(function, sigmoid_scale, at_most(rounded(values[i]), limit_before));
    const float first = rounded_if(rounding, value);
    if (!gated) {
      out[i] = to_bfloat16(first);
      continue;
    }
    const float other = at_least(at_most(rounded(up[i]), limit), -limit) + up_offset;
    out[i] = to_bfloat16(at_most(first, limit_after) * rounded_if(rounding, other));
  }
}

// Whole blocks only: what is left over of vectors would be computed one by one, which takes longer than all the rest.
ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) void gate_values(const GateRun& run,
                                                                              const ActivationFunction function,
                                                                              const bool gated) {
  uint64_t done = 0;
  for (; done + kGateBlock <= run.count; done += kGateBlock) {
    gate_block(run, gated ? run.gate + done : nullptr, run.up + done, run.out + done, function, gated);
  }
  if (done == run.count) return;
  const uint64_t left = run.count - done;
  float gate[kGateBlock] = {};
  float up[kGateBlock] = {};
  uint16_t out[kGateBlock];
  if (gated) __builtin_memcpy(gate, run.gate + done, left * sizeof *gate);
  __builtin_memcpy(up, run.up + done, left * sizeof *up);
  gate_block(run, gate, up, out, function, gated);
  __builtin_memcpy(run.out + done, out, left * sizeof *out);
}

ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) void gate_values(const GateRun& run, const bool gated) {
  switch (run.function) {
    case ActivationFunction::silu:
      return gate_values(run, ActivationFunction::silu, gated);
    case ActivationFunction::gelu:
      return gate_values(run, ActivationFunction::gelu, gated);
    case ActivationFunction::gelu_tanh:
      return gate_values(run, ActivationFunction::gelu_tanh, gated);
    case ActivationFunction::relu:
      return gate_values(run, ActivationFunction::relu, gated);
    case ActivationFunction::relu2:
      return gate_values(run, ActivationFunction::relu2, gated);
    case ActivationFunction::identity:
      return gate_values(run, ActivationFunction::identity, gated);
  }
}

ZIPMOE_ACTIVATION_CODE inline __attribute__((always_inline)) void gate_values(const GateRun& run) {
  if (run.gate != nullptr) {
    gate_values(run, true);
  } else {
    gate_values(run, false);
  }
}

}  // namespace
}  // namespace zipmoe::simd
