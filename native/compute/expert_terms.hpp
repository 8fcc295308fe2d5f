// What lies around the experts of a sparse layer: their rows out of the tokens, and the weighted sums of their outputs.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "compute/compute_threads.hpp"
#include "simd/weighted_sum_kernels.hpp"

namespace zipmoe {

struct ExpertTerms {
  std::span<const float> weights;      // [tokens][top_k]
  std::span<const int64_t> positions;  // of the flattened weights, in the order of the experts' rows; each once
  uint64_t top_k = 0;

  // Throws std::invalid_argument unless these are the positions of so many tokens, and rows of both sides are not
  // empty.
  void check(uint64_t tokens, uint64_t columns, uint64_t out_columns) const;
  // The token that each of the experts' rows belongs to.
  std::vector<uint64_t> tokens_of_rows() const;
  // out[t] = sum over j < top_k, in order, of weight times output, in fp32, rounded to BF16 at the end.
  // outputs: BF16 [positions][columns], out: [tokens][columns].
  void combine(const uint16_t* outputs, uint64_t columns, uint16_t* out, simd::WeightedSum kernel,
               ComputeThreads& threads) const;
};

}  // namespace zipmoe
