// Norms for the instruction set of the baseline.
#define ZIPMOE_VECTOR_CODE
#include "simd/norm_body.hpp"

namespace zipmoe::simd {

void norm_squares_scalar(const NormRows& rows, float* sums) { sum_squares(rows, sums); }
void norm_scale_scalar(const NormRows& rows, const float* factors, const uint16_t* weight, uint16_t* out) {
  scale_rows(rows, factors, weight, out);
}

}  // namespace zipmoe::simd
