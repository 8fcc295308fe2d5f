#include "compute/head_preparation.hpp"

#include <stdexcept>

#include "compute/bfloat16.hpp"

namespace zipmoe {

void RotaryPositions::check(uint64_t head_dimension) const {
  if (dimensions % 2 != 0 || dimensions > head_dimension) {
    throw std::invalid_argument("rotary positions have an even number of dimensions, at most those of a head");
  }
}

void prepare_head(const uint16_t* from, const RmsNorm& norm, const RotaryPositions& positions, uint64_t sequence,
                  uint64_t token, std::span<float> out) {
  for (uint64_t i = 0; i < out.size(); ++i) out[i] = bfloat16_to_float(from[i]);
  if (norm.weight != nullptr) norm.apply(out.data(), out.size(), out.data());
  const uint64_t half = positions.dimensions / 2;
  const uint64_t offset = sequence * positions.stride + token * positions.dimensions;
  const uint16_t* cosines = positions.cosines + offset;
  const uint16_t* sines = positions.sines + offset;
  float* lower = out.data();
  float* upper = lower + half;
  for (uint64_t i = 0; i < half; ++i) {
    const float first = lower[i];
    const float second = upper[i];
    lower[i] = first * bfloat16_to_float(cosines[i]) - second * bfloat16_to_float(sines[i]);
    upper[i] = second * bfloat16_to_float(cosines[half + i]) + first * bfloat16_to_float(sines[half + i]);
  }
}

}  // namespace zipmoe
