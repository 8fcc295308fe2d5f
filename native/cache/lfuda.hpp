// LFU with dynamic ageing (Arlitt et al., 2000): a record's priority is set at each use to its count plus the priority
// of the last victim, so that former favourites do not stay for ever.
#pragma once

#include <vector>

#include "cache/eviction_order.hpp"
#include "cache/eviction_policy.hpp"

namespace zipmoe {

class LeastFrequentlyUsedWithAgeing final : public EvictionPolicy {
 public:
  explicit LeastFrequentlyUsedWithAgeing(uint32_t record_count) : counts_(record_count), order_(record_count) {}
  std::string_view name() const override { return "lfuda"; }
  void requested(std::span<const RecordIndex> records) override;
  void admitted(RecordIndex record) override { order_.insert(record, counts_.at(record) + age_); }
  void used(RecordIndex record) override { order_.touch(record, counts_.at(record) + age_); }
  void removed(RecordIndex record) override;
  std::optional<RecordIndex> victim(const Predicate& evictable) override { return order_.first(evictable); }
  std::unique_ptr<EvictionPolicy> holding(std::span<const RecordIndex> residents) const override;

 private:
  std::vector<double> counts_;  // whole numbers
  double age_ = 0;              // priority of the last record that left
  EvictionOrder order_;
};

}  // namespace zipmoe
