#include "cache/lfuda.hpp"

namespace zipmoe {

void LeastFrequentlyUsedWithAgeing::requested(std::span<const RecordIndex> records) {
  for (const RecordIndex record : records) counts_.at(record) += 1;
}

void LeastFrequentlyUsedWithAgeing::removed(RecordIndex record) {
  age_ = order_.priority(record);
  order_.remove(record);
}

std::unique_ptr<EvictionPolicy> LeastFrequentlyUsedWithAgeing::holding(std::span<const RecordIndex> residents) const {
  auto policy = std::make_unique<LeastFrequentlyUsedWithAgeing>(*this);
  policy->order_.hold(residents);  // at the priority that each had when it was last used or left; nobody ages by this
  return policy;
}

}  // namespace zipmoe
