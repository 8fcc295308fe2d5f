// Recombination in portable C++, in blocks that the compiler can vectorise with what the baseline has.
#include <cstring>

#include "simd/kernels.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kBlockWeights = 64;

uint16_t combine(uint8_t exponent, uint8_t sign_mantissa) {
  return static_cast<uint16_t>(sign_mantissa << 15 | exponent << 7 | sign_mantissa >> 1);
}

}  // namespace

void recombine_scalar(const uint8_t* exponent, const uint8_t* sign_mantissa, uint64_t count, uint16_t* out) {
  uint64_t i = 0;
  for (; i + kBlockWeights <= count; i += kBlockWeights) {
    // Copies, because `out` may overlap `exponent`: the compiler then knows that these do not.
    uint8_t e[kBlockWeights];
    uint8_t sm[kBlockWeights];
    uint16_t words[kBlockWeights];
    std::memcpy(e, exponent + i, sizeof e);
    std::memcpy(sm, sign_mantissa + i, sizeof sm);
    for (uint64_t j = 0; j < kBlockWeights; ++j) words[j] = combine(e[j], sm[j]);
    std::memcpy(out + i, words, sizeof words);
  }
  for (; i < count; ++i) out[i] = combine(exponent[i], sign_mantissa[i]);
}

}  // namespace zipmoe::simd
