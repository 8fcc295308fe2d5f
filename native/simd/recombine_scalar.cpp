#include <bit>

#include "simd/kernels.hpp"

namespace zipmoe::simd {

void recombine_scalar(const uint8_t* exponent, const uint8_t* sign_mantissa, uint64_t count, uint16_t* out) {
  for (uint64_t i = 0; i < count; ++i) {
    const auto word = static_cast<uint16_t>(exponent[i] << 8 | sign_mantissa[i]);
    out[i] = std::rotr(word, 1);
  }
}

}  // namespace zipmoe::simd
