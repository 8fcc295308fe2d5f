#if defined(__x86_64__)
#include "simd/avx512_intrinsics.hpp"

#include "simd/kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {

ZIPMOE_AVX512_CODE void recombine_avx512(const uint8_t* exponent, const uint8_t* sign_mantissa, uint64_t count,
                                         uint16_t* out) {
  // Quadwords 0 4 1 5 2 6 3 7: unpacking within 128-bit lanes then gives natural order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  uint64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    const __m512i e = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(exponent + i));
    const __m512i s = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(sign_mantissa + i));
    const __m512i low = _mm512_unpacklo_epi8(s, e);
    const __m512i high = _mm512_unpackhi_epi8(s, e);
    _mm512_storeu_si512(out + i, _mm512_shrdi_epi16(low, low, 1));
    _mm512_storeu_si512(out + i + 32, _mm512_shrdi_epi16(high, high, 1));
  }
  for (; i < count; i += 32) {
    const uint64_t left = count - i < 32 ? count - i : 32;
    const __mmask32 mask = (__mmask32)((1ull << left) - 1);
    const __m512i e = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, exponent + i));
    const __m512i s = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, sign_mantissa + i));
    const __m512i word = _mm512_or_si512(_mm512_slli_epi16(e, 8), s);
    _mm512_mask_storeu_epi16(out + i, mask, _mm512_shrdi_epi16(word, word, 1));
  }
}

}  // namespace zipmoe::simd
#endif
