#include "compute/expert_terms.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "compute/bfloat16.hpp"

namespace zipmoe {

void ExpertTerms::check(uint64_t tokens, uint64_t columns, uint64_t out_columns) const {
  if (tokens == 0 || top_k == 0 || columns == 0 || out_columns == 0 || weights.size() != tokens * top_k ||
      positions.size() != weights.size()) {
    throw std::invalid_argument("every token has top_k experts, with a weight and a position each");
  }
  std::vector<bool> seen(positions.size());
  for (const int64_t position : positions) {
    if (position < 0 || static_cast<uint64_t>(position) >= seen.size() || seen[static_cast<uint64_t>(position)]) {
      throw std::invalid_argument("every position occurs once");
    }
    seen[static_cast<uint64_t>(position)] = true;
  }
}

void ExpertTerms::gather(const uint16_t* x, uint64_t columns, uint16_t* rows) const {
  for (const int64_t position : positions) {
    std::copy_n(x + static_cast<uint64_t>(position) / top_k * columns, columns, rows);
    rows += columns;
  }
}

void ExpertTerms::combine(const uint16_t* outputs, uint64_t columns, uint16_t* out) const {
  std::vector<uint64_t> row_of(positions.size());
  for (uint64_t row = 0; row < positions.size(); ++row) row_of[static_cast<uint64_t>(positions[row])] = row;
  std::vector<float> sums(columns);
  for (uint64_t token = 0; token < positions.size() / top_k; ++token) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (uint64_t j = token * top_k; j < (token + 1) * top_k; ++j) {
      const uint16_t* output = outputs + row_of[j] * columns;
      const float weight = weights[j];
      for (uint64_t i = 0; i < columns; ++i) sums[i] += weight * bfloat16_to_float(output[i]);
    }
    for (uint64_t i = 0; i < columns; ++i) out[token * columns + i] = float_to_bfloat16(sums[i]);
  }
}

}  // namespace zipmoe
