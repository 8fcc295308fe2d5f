// Random marking (Fiat et al., 1991): a use marks a record; the victim is drawn from the unmarked ones, and when all
// that may go are marked, their marks are taken away.
#pragma once

#include <vector>

#include "cache/eviction_policy.hpp"

namespace zipmoe {

class RandomMarking final : public EvictionPolicy {
 public:
  RandomMarking(uint32_t record_count, uint64_t seed) : marks_(record_count, Mark::absent), random_state_(seed) {}
  std::string_view name() const override { return "marking"; }
  void admitted(RecordIndex record) override { marks_.at(record) = Mark::marked; }
  void used(RecordIndex record) override { marks_.at(record) = Mark::marked; }
  void removed(RecordIndex record) override { marks_.at(record) = Mark::absent; }
  std::optional<RecordIndex> victim(const Predicate& evictable) override;
  std::unique_ptr<EvictionPolicy> holding(std::span<const RecordIndex> residents) const override;

 private:
  enum class Mark : uint8_t { absent, unmarked, marked };
  uint64_t next_random();

  std::vector<Mark> marks_;
  uint64_t random_state_;
};

}  // namespace zipmoe
