// Least frequently used: evict the record with the fewest requests since the beginning, those before its admission
// included; among equals the longest unused.
#pragma once

#include <vector>

#include "cache/eviction_order.hpp"
#include "cache/eviction_policy.hpp"

namespace zipmoe {

class LeastFrequentlyUsed final : public EvictionPolicy {
 public:
  explicit LeastFrequentlyUsed(uint32_t record_count) : counts_(record_count), order_(record_count) {}
  std::string_view name() const override { return "lfu"; }
  void requested(std::span<const RecordIndex> records) override;
  void admitted(RecordIndex record) override { order_.insert(record, counts_.at(record)); }
  void used(RecordIndex record) override { order_.touch(record, counts_.at(record)); }
  void removed(RecordIndex record) override { order_.remove(record); }
  std::optional<RecordIndex> victim(const Predicate& evictable) override { return order_.first(evictable); }
  std::unique_ptr<EvictionPolicy> holding(std::span<const RecordIndex> residents) const override;

 private:
  std::vector<double> counts_;  // whole numbers
  EvictionOrder order_;
};

}  // namespace zipmoe
