// Least recently used: evict the record whose last use is longest ago.
#pragma once

#include <vector>

#include "cache/eviction_policy.hpp"

namespace zipmoe {

class LeastRecentlyUsed final : public EvictionPolicy {
 public:
  explicit LeastRecentlyUsed(uint32_t record_count);
  std::string_view name() const override { return "lru"; }
  void admitted(RecordIndex record) override;
  void used(RecordIndex record) override;
  void removed(RecordIndex record) override;
  std::optional<RecordIndex> victim(const Predicate& evictable) override;
  std::unique_ptr<EvictionPolicy> holding(std::span<const RecordIndex> residents) const override;

 private:
  struct Link {
    RecordIndex older;
    RecordIndex newer;
  };
  void unlink(RecordIndex record);
  void link_newest(RecordIndex record);

  // A ring of all resident records, indexed by record; the last entry is its sentinel.
  std::vector<Link> links_;
  RecordIndex sentinel_;
};

}  // namespace zipmoe
