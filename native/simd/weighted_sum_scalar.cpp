// Weighted sums for the instruction set of the baseline.
#define ZIPMOE_VECTOR_CODE
#include "simd/weighted_sum_body.hpp"

namespace zipmoe::simd {

void weighted_sum_scalar(const WeightedRows& terms, uint16_t* out) { sum_rows(terms, out); }

}  // namespace zipmoe::simd
