#include "cache/lfu.hpp"

namespace zipmoe {

void LeastFrequentlyUsed::requested(std::span<const RecordIndex> records) {
  for (const RecordIndex record : records) order_.set_priority(record, counts_.at(record) += 1);
}

std::unique_ptr<EvictionPolicy> LeastFrequentlyUsed::holding(std::span<const RecordIndex> residents) const {
  auto policy = std::make_unique<LeastFrequentlyUsed>(*this);
  policy->order_ = EvictionOrder(static_cast<uint32_t>(counts_.size()));
  for (const RecordIndex record : residents) policy->admitted(record);
  return policy;
}

}  // namespace zipmoe
