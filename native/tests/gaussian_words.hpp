// BF16 patterns of normally distributed numbers, for tests.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "compute/bfloat16.hpp"

namespace zipmoe {

using Words = std::vector<uint16_t>;

inline Words gaussian(uint64_t count, uint64_t seed, float mean = 0.0f, float deviation = 1.0f) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(mean, deviation);
  Words words(count);
  for (uint16_t& word : words) word = float_to_bfloat16(normal(random));
  return words;
}

}  // namespace zipmoe
