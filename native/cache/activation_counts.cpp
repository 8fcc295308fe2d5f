#include "cache/activation_counts.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace zipmoe {

ActivationCounts::ActivationCounts(uint32_t record_count, double half_life_steps)
    : half_life_steps_(half_life_steps),
      counts_(record_count),
      steps_(record_count),
      weights_(record_count, -std::numeric_limits<double>::infinity()) {
  if (!(half_life_steps > 0)) throw std::invalid_argument("the half-life must be above 0 steps");
}

void ActivationCounts::activate(RecordIndex record, uint64_t step) {
  double& count = counts_.at(record);
  // With an infinite half-life both quotients are 0 and the weight is the logarithm of the plain count.
  count = count * std::exp2(-static_cast<double>(step - steps_[record]) / half_life_steps_) + 1;
  steps_[record] = step;
  weights_[record] = std::log2(count) + static_cast<double>(step) / half_life_steps_;
}

uint32_t ActivationCounts::rank(RecordIndex record) const {
  const double own = weight(record);
  return static_cast<uint32_t>(
      std::count_if(weights_.begin(), weights_.end(), [own](double other) { return other > own; }));
}

}  // namespace zipmoe
