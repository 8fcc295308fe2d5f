// Weighted sums for the instruction set AVX2.
#if defined(__x86_64__)
#include "simd/wide_code.hpp"
#define ZIPMOE_VECTOR_CODE ZIPMOE_AVX2_CODE
#include "simd/weighted_sum_body.hpp"

namespace zipmoe::simd {

ZIPMOE_AVX2_CODE void weighted_sum_avx2(const WeightedRows& terms, uint16_t* out) { sum_rows(terms, out); }

}  // namespace zipmoe::simd
#endif
