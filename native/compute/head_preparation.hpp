// What is done to a head's query or key before its products: norm and rotary position, in fp32.
#pragma once
#include <cstdint>
#include <span>

#include "compute/rms_norm.hpp"

namespace zipmoe {

// Rotary positions (Su et al., arXiv 2104.09864) of the first `dimensions` values of a head, whose halves are rotated
// against each other: out[i] = x[i] cos[i] -+ x[i +- dimensions / 2] sin[i].
struct RotaryPositions {
  const uint16_t* cosines = nullptr;  // BF16 [sequences][new tokens][dimensions], or of one sequence for all
  const uint16_t* sines = nullptr;
  uint64_t dimensions = 0;  // even; 0: none
  uint64_t stride = 0;      // values from one sequence to the next, 0 for the same ones

  // Throws std::invalid_argument for positions that such a head does not have.
  void check(uint64_t head_dimension) const;
};

// out[i] for all its values: `from` (BF16) normed, where there is a norm, and rotated to the position of the token.
void prepare_head(const uint16_t* from, const RmsNorm& norm, const RotaryPositions& positions, uint64_t sequence,
                  uint64_t token, std::span<float> out);

}  // namespace zipmoe
