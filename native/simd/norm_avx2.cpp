// Norms for the instruction set AVX2.
#if defined(__x86_64__)
#include "simd/wide_code.hpp"
#define ZIPMOE_VECTOR_CODE ZIPMOE_AVX2_CODE
#include "simd/norm_body.hpp"

namespace zipmoe::simd {

ZIPMOE_AVX2_CODE void norm_squares_avx2(const NormRows& rows, float* sums) { sum_squares(rows, sums); }
ZIPMOE_AVX2_CODE void norm_scale_avx2(const NormRows& rows, const float* factors, const uint16_t* weight,
                                      uint16_t* out) {
  scale_rows(rows, factors, weight, out);
}

}  // namespace zipmoe::simd
#endif
