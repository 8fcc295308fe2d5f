#if defined(__x86_64__)
#include <immintrin.h>

#include "simd/kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {

ZIPMOE_AVX2_CODE void recombine_avx2(const uint8_t* exponent, const uint8_t* sign_mantissa, uint64_t count,
                                     uint16_t* out) {
  uint64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    // Quadwords 0 2 1 3: unpacking within 128-bit lanes then gives natural order.
    const __m256i e = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i_u*)(exponent + i)), 0xD8);
    const __m256i s = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i_u*)(sign_mantissa + i)), 0xD8);
    const __m256i low = _mm256_unpacklo_epi8(s, e);
    const __m256i high = _mm256_unpackhi_epi8(s, e);
    _mm256_storeu_si256((__m256i_u*)(out + i), _mm256_or_si256(_mm256_srli_epi16(low, 1), _mm256_slli_epi16(low, 15)));
    _mm256_storeu_si256((__m256i_u*)(out + i + 16),
                        _mm256_or_si256(_mm256_srli_epi16(high, 1), _mm256_slli_epi16(high, 15)));
  }
  for (; i < count; ++i) {
    const uint32_t e = exponent[i];
    const uint32_t s = sign_mantissa[i];
    out[i] = (uint16_t)(s << 15 | e << 7 | s >> 1);
  }
}

}  // namespace zipmoe::simd
#endif
