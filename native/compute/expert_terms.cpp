#include "compute/expert_terms.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

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

std::vector<uint64_t> ExpertTerms::tokens_of_rows() const {
  std::vector<uint64_t> tokens;
  tokens.reserve(positions.size());
  for (const int64_t position : positions) tokens.push_back(static_cast<uint64_t>(position) / top_k);
  return tokens;
}

void ExpertTerms::combine(const uint16_t* outputs, uint64_t columns, uint16_t* out, simd::WeightedSum kernel,
                          ComputeThreads& threads) const {
  std::vector<const uint16_t*> rows(positions.size());  // in the order of the weights
  for (const int64_t position : positions) {
    rows[static_cast<uint64_t>(position)] = outputs;
    outputs += columns;
  }
  constexpr uint64_t task_values = 1 << 16;  // fewer are summed faster than another thread hears of them
  const uint64_t tokens = positions.size() / top_k;
  const uint64_t task_tokens = std::max<uint64_t>(1, task_values / (top_k * columns));
  threads.run(static_cast<uint32_t>((tokens + task_tokens - 1) / task_tokens), [&](uint32_t task) {
    const uint64_t end = std::min(tokens, (task + 1) * task_tokens);
    for (uint64_t token = task * task_tokens; token < end; ++token) {
      const uint64_t first = token * top_k;
      kernel({rows.data() + first, weights.data() + first, top_k, columns}, out + token * columns);
    }
  });
}

}  // namespace zipmoe
