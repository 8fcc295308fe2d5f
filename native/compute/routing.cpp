#include "compute/routing.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "compute/activation.hpp"
#include "compute/bfloat16.hpp"
#include "compute/compute_threads.hpp"
#include "compute/gemv.hpp"

namespace zipmoe {
namespace {

// Logits to scores, in place.
void apply_score(RouterScore score, std::vector<float>& values) {
  if (score == RouterScore::sigmoid) {
    for (float& value : values) value = -value;
    exponentials(values.data(), values.size());
    for (float& value : values) value = 1.0f / (1.0f + value);
    return;
  }
  exponentials_of_scores(values.data(), values.size());
  float sum = 0.0f;
  for (const float value : values) sum += value;
  for (float& value : values) value /= sum;
}

using Candidate = std::pair<float, int64_t>;

// NaN counts as larger than everything.
bool larger(const Candidate& a, const Candidate& b) {
  return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
}

// The algorithms that torch uses for these sizes, so that equal scores come in its order.
void choose_largest(std::vector<Candidate>& candidates, uint64_t top_k) {
  const auto end = candidates.begin() + static_cast<ptrdiff_t>(top_k);
  if (top_k * 64 <= candidates.size()) {
    std::partial_sort(candidates.begin(), end, candidates.end(), larger);
  } else {
    std::nth_element(candidates.begin(), end - 1, candidates.end(), larger);
    std::sort(candidates.begin(), end - 1, larger);
  }
}

}  // namespace

RouterScore parse_router_score(std::string_view text) {
  if (text == "softmax") return RouterScore::softmax;
  if (text == "sigmoid") return RouterScore::sigmoid;
  throw std::invalid_argument("unknown router score '" + std::string(text) + "'");
}

void route(const WeightMatrix& matrix, const RouterFormula& formula, const uint16_t* x, uint64_t rows,
           const RoutedRows& out, const simd::GemvKernels& kernels) {
  const auto [experts, columns] = matrix.shape();
  if (formula.top_k == 0 || formula.top_k > experts) throw std::invalid_argument("so many experts are not there");
  ComputeThreads caller_only(1);
  const TokenInputs inputs({x, columns}, rows, columns, caller_only);
  gemv({.matrix = matrix}, inputs, {.bfloat16 = out.logits, .stride = experts}, caller_only, kernels);
  std::vector<float> scores(experts);
  std::vector<Candidate> candidates(experts);
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t i = 0; i < experts; ++i) {
      scores[i] = bfloat16_to_float(out.logits[row * experts + i]);
      candidates[i] = {scores[i], static_cast<int64_t>(i)};
    }
    apply_score(formula.score, scores);
    // By logit: different ones may have scores that fp32 cannot tell apart (sigmoid of large values).
    choose_largest(candidates, formula.top_k);
    const auto score = [&](uint64_t i) { return scores[static_cast<uint64_t>(candidates[i].second)]; };
    float sum = 0.0f;
    for (uint64_t i = 0; i < formula.top_k; ++i) sum += score(i);
    for (uint64_t i = 0; i < formula.top_k; ++i) {
      const uint64_t at = row * formula.top_k + i;
      out.weights[at] = formula.normalised ? score(i) / sum : score(i);
      out.experts[at] = candidates[i].second;
    }
  }
}

}  // namespace zipmoe
