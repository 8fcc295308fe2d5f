#include "cache/eviction_order.hpp"

#include <tuple>

namespace zipmoe {

bool EvictionOrder::Key::operator<(const Key& other) const {
  return std::tie(priority, last_use, record) < std::tie(other.priority, other.last_use, other.record);
}

void EvictionOrder::place(RecordIndex record, double priority, uint64_t last_use) {
  Entry& entry = keys_.at(record);
  if (entry.resident) order_.erase(entry.key);
  entry = {{priority, last_use, record}, true};
  order_.insert(entry.key);
}

void EvictionOrder::insert(RecordIndex record, double priority) { place(record, priority, ++uses_); }

void EvictionOrder::remove(RecordIndex record) {
  Entry& entry = keys_.at(record);
  if (!entry.resident) return;
  order_.erase(entry.key);
  entry.resident = false;
}

void EvictionOrder::set_priority(RecordIndex record, double priority) {
  if (contains(record)) place(record, priority, keys_[record].key.last_use);
}

void EvictionOrder::touch(RecordIndex record, double priority) {
  if (contains(record)) place(record, priority, ++uses_);
}

std::optional<RecordIndex> EvictionOrder::first(const EvictionPolicy::Predicate& evictable) const {
  for (const Key& key : order_) {
    if (evictable(key.record)) return key.record;
  }
  return std::nullopt;
}

}  // namespace zipmoe
