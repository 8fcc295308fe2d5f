// Resident records in the order of their priority; among equals, the longest unused comes first.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "cache/eviction_policy.hpp"

namespace zipmoe {

class EvictionOrder {
 public:
  explicit EvictionOrder(uint32_t record_count) : keys_(record_count) {}

  bool contains(RecordIndex record) const { return keys_.at(record).resident; }
  double priority(RecordIndex record) const { return keys_.at(record).key.priority; }
  void insert(RecordIndex record, double priority);
  void remove(RecordIndex record);
  // Changes the priority of a record; one that is not resident is ignored.
  void set_priority(RecordIndex record, double priority);
  // The record becomes the most recently used among its equals.
  void touch(RecordIndex record, double priority);
  std::optional<RecordIndex> first(const EvictionPolicy::Predicate& evictable) const;

 private:
  struct Key {
    double priority = 0;
    uint64_t last_use = 0;
    RecordIndex record = 0;
    bool operator<(const Key& other) const;
  };
  struct Entry {
    Key key;
    bool resident = false;
  };
  void place(RecordIndex record, double priority, uint64_t last_use);

  std::vector<Entry> keys_;
  std::set<Key> order_;
  uint64_t uses_ = 0;
};

}  // namespace zipmoe
