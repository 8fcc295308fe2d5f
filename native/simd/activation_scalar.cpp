// Activations and gates for the instruction set of the baseline.
#define ZIPMOE_ACTIVATION_CODE
#include "simd/activation_body.hpp"

namespace zipmoe::simd {

void gate_scalar(const GateRun& run) { gate_values(run); }

}  // namespace zipmoe::simd
