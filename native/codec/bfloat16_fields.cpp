#include "codec/bfloat16_fields.hpp"

#include <cstddef>
#include <stdexcept>

#include "simd/kernels.hpp"

namespace zipmoe {

void split(std::span<const uint16_t> weights, std::span<uint8_t> exponent, std::span<uint8_t> sign_mantissa) {
  if (exponent.size() != weights.size() || sign_mantissa.size() != weights.size()) {
    throw std::invalid_argument("split needs planes of as many bytes as there are weights");
  }
  const uint16_t* __restrict in = weights.data();
  uint8_t* __restrict e = exponent.data();
  uint8_t* __restrict sm = sign_mantissa.data();
  for (size_t i = 0; i < weights.size(); ++i) {
    e[i] = static_cast<uint8_t>(in[i] >> 7);
    sm[i] = static_cast<uint8_t>(in[i] << 1 | in[i] >> 15);
  }
}

void keep_sign_mantissa(std::span<const uint16_t> weights, std::span<uint8_t> sign_mantissa) {
  if (sign_mantissa.size() != weights.size()) {
    throw std::invalid_argument("a plane has as many bytes as there are weights");
  }
  const uint16_t* __restrict in = weights.data();
  uint8_t* __restrict out = sign_mantissa.data();
  for (size_t i = 0; i < weights.size(); ++i) out[i] = static_cast<uint8_t>(in[i] << 1 | in[i] >> 15);
}

void recombine(std::span<const uint8_t> exponent, std::span<const uint8_t> sign_mantissa, std::span<uint16_t> out,
               InstructionSet instruction_set) {
  if (exponent.size() != out.size() || sign_mantissa.size() != out.size()) {
    throw std::invalid_argument("recombine needs planes of as many bytes as there are weights");
  }
  simd::kernels(instruction_set).recombine(exponent.data(), sign_mantissa.data(), out.size(), out.data());
}

}  // namespace zipmoe
