// The paper's policy: evict the record with the smallest decayed activation count; ranks by the same counts say which
// pool an expert belongs to (LayerPools).
#pragma once

#include "cache/activation_counts.hpp"
#include "cache/eviction_order.hpp"
#include "cache/eviction_policy.hpp"

namespace zipmoe {

class DecayingFrequency final : public EvictionPolicy {
 public:
  DecayingFrequency(uint32_t record_count, double half_life_steps, uint32_t requests_per_step);
  std::string_view name() const override { return "zipmoe"; }
  void requested(std::span<const RecordIndex> records) override;
  void admitted(RecordIndex record) override { order_.insert(record, counts_.weight(record)); }
  void used(RecordIndex record) override { order_.touch(record, counts_.weight(record)); }
  void removed(RecordIndex record) override { order_.remove(record); }
  std::optional<RecordIndex> victim(const Predicate& evictable) override { return order_.first(evictable); }
  std::optional<uint32_t> rank(RecordIndex record) const override { return counts_.rank(record); }
  std::unique_ptr<EvictionPolicy> holding(std::span<const RecordIndex> residents) const override;

 private:
  ActivationCounts counts_;
  EvictionOrder order_;
  uint32_t requests_per_step_;
  uint64_t requests_ = 0;
};

}  // namespace zipmoe
