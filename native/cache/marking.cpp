#include "cache/marking.hpp"

namespace zipmoe {

// SplitMix64 (Steele et al., 2014): a few lines that give the same numbers with every library.
uint64_t RandomMarking::next_random() {
  random_state_ += 0x9E3779B97F4A7C15U;
  uint64_t mixed = random_state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
  return mixed ^ (mixed >> 31);
}

std::unique_ptr<EvictionPolicy> RandomMarking::holding(std::span<const RecordIndex> residents) const {
  auto policy = std::make_unique<RandomMarking>(*this);
  for (Mark& mark : policy->marks_) mark = Mark::absent;
  for (const RecordIndex record : residents) {
    policy->marks_.at(record) = marks_[record] == Mark::marked ? Mark::marked : Mark::unmarked;
  }
  return policy;
}

std::optional<RecordIndex> RandomMarking::victim(const Predicate& evictable) {
  std::vector<RecordIndex> unmarked;
  std::vector<RecordIndex> marked;
  for (RecordIndex record = 0; record < marks_.size(); ++record) {
    if (marks_[record] == Mark::absent || !evictable(record)) continue;
    (marks_[record] == Mark::marked ? marked : unmarked).push_back(record);
  }
  if (unmarked.empty()) {
    for (const RecordIndex record : marked) marks_[record] = Mark::unmarked;
    unmarked.swap(marked);
  }
  if (unmarked.empty()) return std::nullopt;
  return unmarked[next_random() % unmarked.size()];
}

}  // namespace zipmoe
