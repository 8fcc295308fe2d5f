#include "cache/zipmoe.hpp"

#include <stdexcept>

namespace zipmoe {

DecayingFrequency::DecayingFrequency(uint32_t record_count, double half_life_steps, uint32_t requests_per_step)
    : counts_(record_count, half_life_steps), order_(record_count), requests_per_step_(requests_per_step) {
  if (requests_per_step == 0) throw std::invalid_argument("a step has at least one request");
}

void DecayingFrequency::requested(std::span<const RecordIndex> records) {
  const uint64_t step = requests_++ / requests_per_step_;
  for (const RecordIndex record : records) {
    counts_.activate(record, step);
    order_.set_priority(record, counts_.weight(record));
  }
}

std::unique_ptr<EvictionPolicy> DecayingFrequency::holding(std::span<const RecordIndex> residents) const {
  auto policy = std::make_unique<DecayingFrequency>(*this);
  policy->order_ = EvictionOrder(counts_.records());
  for (const RecordIndex record : residents) policy->admitted(record);
  return policy;
}

}  // namespace zipmoe
