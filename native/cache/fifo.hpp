// First in, first out: evict the record that was admitted longest ago, however often it was used since.
#pragma once

#include "cache/eviction_order.hpp"
#include "cache/eviction_policy.hpp"

namespace zipmoe {

class FirstInFirstOut final : public EvictionPolicy {
 public:
  explicit FirstInFirstOut(uint32_t record_count) : order_(record_count) {}
  std::string_view name() const override { return "fifo"; }
  void admitted(RecordIndex record) override { order_.insert(record, 0); }
  void used(RecordIndex /*record*/) override {}
  void removed(RecordIndex record) override { order_.remove(record); }
  std::optional<RecordIndex> victim(const Predicate& evictable) override { return order_.first(evictable); }
  bool values_use() const override { return false; }
  std::unique_ptr<EvictionPolicy> holding(std::span<const RecordIndex> residents) const override {
    auto policy = std::make_unique<FirstInFirstOut>(*this);
    policy->order_.hold(residents);  // those that it did not hold count as admitted after the others, in their order
    return policy;
  }

 private:
  EvictionOrder order_;  // equal priorities: the order of admission
};

}  // namespace zipmoe
