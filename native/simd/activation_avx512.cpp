// Activations and gates for the instruction set AVX-512.
#if defined(__x86_64__)
#include "simd/wide_code.hpp"
#define ZIPMOE_ACTIVATION_CODE ZIPMOE_AVX512_CODE
#include "simd/activation_body.hpp"

namespace zipmoe::simd {

ZIPMOE_AVX512_CODE void gate_avx512(const GateRun& run) { gate_values(run); }

}  // namespace zipmoe::simd
#endif
