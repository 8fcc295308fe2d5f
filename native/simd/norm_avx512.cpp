// Norms for the instruction set AVX-512.
#if defined(__x86_64__)
#include "simd/wide_code.hpp"
#define ZIPMOE_VECTOR_CODE ZIPMOE_AVX512_CODE
#include "simd/norm_body.hpp"

namespace zipmoe::simd {

ZIPMOE_AVX512_CODE void norm_squares_avx512(const NormRows& rows, float* sums) { sum_squares(rows, sums); }
ZIPMOE_AVX512_CODE void norm_scale_avx512(const NormRows& rows, const float* factors, const uint16_t* weight,
                                          uint16_t* out) {
  scale_rows(rows, factors, weight, out);
}

}  // namespace zipmoe::simd
#endif
