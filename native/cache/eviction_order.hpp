// Resident records in the order of their priority; among equals, the longest unused comes first.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cache/eviction_policy.hpp"

namespace zipmoe {

// A binary heap whose entries know their places: the order changes with every use, and is asked for its first only.
class EvictionOrder {
 public:
  explicit EvictionOrder(uint32_t record_count) : priorities_(record_count), places_(record_count, kAbsent) {}

  bool contains(RecordIndex record) const { return places_.at(record) != kAbsent; }
  // Of a record that is not resident: the last one that it had, 0 if it never had one.
  double priority(RecordIndex record) const { return priorities_.at(record); }
  void insert(RecordIndex record, double priority);
  void remove(RecordIndex record);
  // Changes the priority of a record; one that is not resident is ignored.
  void set_priority(RecordIndex record, double priority);
  // The record becomes the most recently used among its equals.
  void touch(RecordIndex record, double priority);
  std::optional<RecordIndex> first(const EvictionPolicy::Predicate& evictable) const;
  // Holds exactly these records from now on. Who was resident keeps its place, the others come in at their last
  // priority, as if used in the given order just now.
  void hold(std::span<const RecordIndex> residents);

 private:
  static constexpr uint32_t kAbsent = UINT32_MAX;
  struct Entry {
    double priority;
    uint64_t last_use;  // no two records have the same
    RecordIndex record;
    bool operator<(const Entry& other) const {
      return priority != other.priority ? priority < other.priority : last_use < other.last_use;
    }
  };

  void change(RecordIndex record, double priority, uint64_t last_use);
  void put(uint32_t place, const Entry& entry);
  void rise(uint32_t place, const Entry& entry);
  void sink(uint32_t place, const Entry& entry);
  void search(uint32_t place, const EvictionPolicy::Predicate& evictable, const Entry*& found) const;

  std::vector<double> priorities_;  // by record
  std::vector<uint32_t> places_;    // in the heap, by record
  std::vector<Entry> heap_;         // no entry comes before its parent, that of i being (i - 1) / 2
  uint64_t uses_ = 0;
};

}  // namespace zipmoe
