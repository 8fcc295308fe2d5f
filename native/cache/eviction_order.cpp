#include "cache/eviction_order.hpp"

#include <utility>

namespace zipmoe {

void EvictionOrder::put(uint32_t place, const Entry& entry) {
  heap_[place] = entry;
  places_[entry.record] = place;
}

// Both leave a hole at `place`, move it until `entry` fits, and fill it.
void EvictionOrder::rise(uint32_t place, const Entry& entry) {
  while (place > 0 && entry < heap_[(place - 1) / 2]) {
    put(place, heap_[(place - 1) / 2]);
    place = (place - 1) / 2;
  }
  put(place, entry);
}

void EvictionOrder::sink(uint32_t place, const Entry& entry) {
  const auto count = static_cast<uint32_t>(heap_.size());
  for (uint32_t child = 2 * place + 1; child < count; child = 2 * place + 1) {
    if (child + 1 < count && heap_[child + 1] < heap_[child]) ++child;
    if (!(heap_[child] < entry)) break;
    put(place, heap_[child]);
    place = child;
  }
  put(place, entry);
}

void EvictionOrder::change(RecordIndex record, double priority, uint64_t last_use) {
  const Entry entry{priority, last_use, record};
  priorities_[record] = priority;
  const uint32_t place = places_[record];
  if (entry < heap_[place]) {
    rise(place, entry);
  } else {
    sink(place, entry);
  }
}

void EvictionOrder::insert(RecordIndex record, double priority) {
  if (contains(record)) {
    change(record, priority, ++uses_);
    return;
  }
  priorities_[record] = priority;
  const Entry entry{priority, ++uses_, record};
  heap_.push_back(entry);
  rise(static_cast<uint32_t>(heap_.size() - 1), entry);
}

void EvictionOrder::remove(RecordIndex record) {
  if (!contains(record)) return;
  const uint32_t place = std::exchange(places_[record], kAbsent);
  const Entry last = heap_.back();
  heap_.pop_back();
  if (last.record == record) return;
  if (place > 0 && last < heap_[(place - 1) / 2]) {
    rise(place, last);
  } else {
    sink(place, last);
  }
}

void EvictionOrder::set_priority(RecordIndex record, double priority) {
  if (contains(record)) change(record, priority, heap_[places_[record]].last_use);
}

void EvictionOrder::touch(RecordIndex record, double priority) {
  if (contains(record)) change(record, priority, ++uses_);
}

void EvictionOrder::hold(std::span<const RecordIndex> residents) {
  std::vector<bool> held(places_.size(), false);
  for (const RecordIndex record : residents) held.at(record) = true;
  for (RecordIndex record = 0; record < places_.size(); ++record) {
    if (!held[record]) remove(record);
  }
  for (const RecordIndex record : residents) {
    if (!contains(record)) insert(record, priority(record));
  }
}

// What lies below an entry comes after it: nothing better than what was found, or than an evictable entry, is there.
void EvictionOrder::search(uint32_t place, const EvictionPolicy::Predicate& evictable, const Entry*& found) const {
  if (place >= heap_.size() || (found != nullptr && *found < heap_[place])) return;
  if (evictable(heap_[place].record)) {
    found = &heap_[place];
    return;
  }
  const uint32_t left = 2 * place + 1;
  const bool right_first = left + 1 < heap_.size() && heap_[left + 1] < heap_[left];
  search(right_first ? left + 1 : left, evictable, found);
  search(right_first ? left : left + 1, evictable, found);
}

std::optional<RecordIndex> EvictionOrder::first(const EvictionPolicy::Predicate& evictable) const {
  const Entry* found = nullptr;
  search(0, evictable, found);
  return found == nullptr ? std::nullopt : std::optional(found->record);
}

}  // namespace zipmoe
