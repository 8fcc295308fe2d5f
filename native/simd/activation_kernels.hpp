// Kernels of what lies between the matrices of a feed-forward network: one source for all instruction sets
// (activation_body.hpp), and the same bits from each. Plain C types only (wide_code.hpp).
#pragma once
#include <stdint.h>

namespace zipmoe {

enum class ActivationFunction : uint8_t {
  silu,       // x * sigmoid(sigmoid_scale * x); with scale 1.702 this is "quick_gelu"
  gelu,       // with erf
  gelu_tanh,  // with tanh
  relu,
  relu2,  // relu(x) squared
  identity,
};

namespace simd {

// GatedActivation (compute/activation.hpp) of some values.
struct GateRun {
  const float* gate;  // [count], null: f(up); rounded to BF16 first, as `up`
  const float* up;    // [count]
  uint64_t count;
  uint16_t* out;  // BF16 [count]
  ActivationFunction function;
  float sigmoid_scale;
  float limit;
  bool limit_activated;
  float up_offset;
  bool rounds_between;
};

// Values that a kernel computes at once: what is less takes as long.
constexpr uint64_t kGateBlock = 32;

using Gate = void (*)(const GateRun& run);

void gate_scalar(const GateRun& run);

#if defined(__x86_64__)
void gate_avx2(const GateRun& run);
void gate_avx512(const GateRun& run);
#endif

}  // namespace simd
}  // namespace zipmoe
