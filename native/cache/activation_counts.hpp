// How often each record was activated, where an activation counts half after every half-life.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/eviction_policy.hpp"

namespace zipmoe {

class ActivationCounts {
 public:
  // `half_life_steps` above 0; infinity: no decay. Throws std::invalid_argument.
  ActivationCounts(uint32_t record_count, double half_life_steps);

  void activate(RecordIndex record, uint64_t step);  // steps never go back
  // Grows with the decayed count and orders records alike at whatever step it is looked at: decay multiplies all
  // counts by the same factor. (Logarithm of the count as of step 0, so that nothing overflows.)
  double weight(RecordIndex record) const { return weights_.at(record); }
  uint32_t records() const { return static_cast<uint32_t>(weights_.size()); }
  // Records with a larger decayed count.
  uint32_t rank(RecordIndex record) const;

 private:
  double half_life_steps_;
  std::vector<double> counts_;   // as of the record's last activation
  std::vector<uint64_t> steps_;  // of the last activation
  std::vector<double> weights_;
};

}  // namespace zipmoe
