#include "cache/policy_choice.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace zipmoe {

PolicyChoice::PolicyChoice(uint32_t candidates, uint32_t first, const ChoiceOptions& options)
    : options_(options),
      candidates_(candidates),
      costs_(size_t{options.window_steps} * candidates),
      sums_(candidates),
      chosen_(first) {
  if (first >= candidates) throw std::invalid_argument("the first choice is not among the candidates");
  if (options.least_steps < 2 || options.window_steps < options.least_steps) {
    throw std::invalid_argument("a choice needs a window of at least 2 steps, and of as many as are to be seen");
  }
  if (!(options.margin >= 0) || !(options.standard_errors >= 0)) {
    throw std::invalid_argument("what a candidate must be better by is not negative");
  }
}

double PolicyChoice::mean_cost(uint32_t candidate) const {
  return kept_steps_ == 0 ? 0.0 : sums_.at(candidate) / kept_steps_;
}

bool PolicyChoice::better(uint32_t candidate) const {
  const double gain = sums_[chosen_] - sums_[candidate];
  if (!(gain > 0) || gain < options_.margin * sums_[chosen_]) return false;
  const double mean = gain / kept_steps_;
  double squares = 0;
  for (uint32_t step = 0; step < kept_steps_; ++step) {
    const double* row = costs_.data() + size_t{step} * candidates_;
    const double deviation = row[chosen_] - row[candidate] - mean;
    squares += deviation * deviation;
  }
  const double steps = kept_steps_;
  return mean > options_.standard_errors * std::sqrt(squares / (steps - 1) / steps);
}

bool PolicyChoice::step(std::span<const double> costs) {
  if (costs.size() != candidates_) throw std::invalid_argument("a step has one cost per candidate");
  std::copy(costs.begin(), costs.end(), costs_.begin() + static_cast<ptrdiff_t>(size_t{next_} * candidates_));
  next_ = (next_ + 1) % options_.window_steps;
  kept_steps_ = std::min(kept_steps_ + 1, options_.window_steps);
  // Added up anew: a difference of running sums would keep the rounding errors of all steps that ever were.
  std::fill(sums_.begin(), sums_.end(), 0.0);
  for (uint32_t step = 0; step < kept_steps_; ++step) {
    for (uint32_t i = 0; i < candidates_; ++i) sums_[i] += costs_[size_t{step} * candidates_ + i];
  }
  if (kept_steps_ < options_.least_steps) return false;
  uint32_t best = chosen_;
  for (uint32_t i = 0; i < candidates_; ++i) {
    if (sums_[i] < sums_[best] && better(i)) best = i;
  }
  if (best == chosen_) return false;
  chosen_ = best;
  ++changes_;
  return true;
}

}  // namespace zipmoe
