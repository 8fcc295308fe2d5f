#include "runtime/look_ahead.hpp"

#include <algorithm>
#include <utility>

namespace zipmoe {
namespace {

constexpr std::chrono::milliseconds kWaitSlice{1000};
// Under way, or waiting for being taken. Others share the reader's queue.
constexpr size_t kReadsMost = 256;

// Pins those of the records that are resident while it lives.
class PinnedResidents {
 public:
  PinnedResidents(ExpertCache& cache, std::span<const RecordIndex> records) : cache_(cache) {
    pinned_.reserve(records.size());
    for (const RecordIndex record : records) {
      if (!cache.resident(record)) continue;
      cache.pin(record);
      pinned_.push_back(record);
    }
  }
  ~PinnedResidents() {
    for (const RecordIndex record : pinned_) cache_.unpin(record);
  }
  PinnedResidents(const PinnedResidents&) = delete;
  PinnedResidents& operator=(const PinnedResidents&) = delete;

 private:
  ExpertCache& cache_;
  std::vector<RecordIndex> pinned_;
};

}  // namespace

std::vector<LookAhead::Read>::iterator LookAhead::find(RecordIndex record) {
  return std::ranges::find(reads_, record, &Read::record);
}

void LookAhead::predict(std::span<const RecordIndex> records) {
  predict_in_sweep({records.begin(), records.end()});
  collect();
  const PinnedResidents kept(cache_, predicted_);
  while (!without_slot_.empty()) {  // one that finds no room may be of another size class than the next
    start(AheadRoom::spared, without_slot_.size());
    if (!without_slot_.empty()) without_slot_.pop_front();
  }
}

void LookAhead::predict_in_sweep(std::vector<RecordIndex> records) {
  predicted_ = std::move(records);
  without_slot_.assign(predicted_.begin(), predicted_.end());
}

void LookAhead::predict_sweep(std::vector<RecordIndex> records) {
  drop();
  cache_.sweep_begins();
  predict_in_sweep(std::move(records));
  go_on(AheadRoom::any);
}

void LookAhead::go_on() { go_on(AheadRoom::passed); }

void LookAhead::go_on(AheadRoom room) {
  if (without_slot_.empty()) return;
  collect();
  const PinnedResidents kept(cache_, predicted_);
  start(AheadRoom::unused, without_slot_.size());
  const size_t most = cache_.turning().ahead;
  if (reads_.size() < most) start(room, most - reads_.size());
}

// At most `most` of those without a slot, until one finds no room. Those that are predicted are pinned meanwhile, else
// they would be evicted, and read once more a moment later.
void LookAhead::start(AheadRoom room, size_t most) {
  for (; most > 0 && !without_slot_.empty() && reads_.size() < kReadsMost; without_slot_.pop_front()) {
    const RecordIndex record = without_slot_.front();
    if (!cache_.absent(record)) continue;
    uint8_t* slot = cache_.acquire_ahead(record, room);
    if (slot == nullptr) return;
    reads_.push_back({.record = record, .dropped = false, .outcome = {}});
    ++counters_.predicted;
    loader_.start_ahead(record, slot);
    --most;
  }
}

std::optional<LookAhead::Taken> LookAhead::take(RecordIndex record) {
  collect();
  auto found = find(record);
  while (found != reads_.end() && found->dropped) {  // only its blocks under way are waited for
    if (auto outcome = loader_.take_ahead(kWaitSlice)) receive(std::move(*outcome));
    found = find(record);
  }
  if (found == reads_.end()) return std::nullopt;
  Taken taken{.begun = true, .outcome = std::move(found->outcome)};
  reads_.erase(found);
  if (!taken.outcome) {
    RecordLoader::Adopted adopted = loader_.adopt(record);
    taken = {.begun = adopted.begun, .outcome = std::move(adopted.outcome)};
  }
  const bool failed = taken.outcome && taken.outcome->failure;
  if (taken.begun && !failed) counters_.used_bytes += table_[record].length;
  cache_.claim(record);
  return taken;
}

void LookAhead::drop() {
  predicted_.clear();
  without_slot_.clear();
  if (reads_.empty()) return;
  std::vector<Read> present;
  for (Read& read : reads_) {
    read.dropped = true;
    if (read.outcome) present.push_back(read);
  }
  for (const Read& read : present) {
    discard(read, *read.outcome);
    reads_.erase(find(read.record));
  }
  if (!reads_.empty()) loader_.cancel_ahead();
  collect();
}

void LookAhead::clear() {
  drop();
  while (!reads_.empty()) {
    if (auto outcome = loader_.take_ahead(kWaitSlice)) receive(std::move(*outcome));
  }
}

void LookAhead::collect() {
  while (auto outcome = loader_.take_ahead()) receive(std::move(*outcome));
}

void LookAhead::receive(LoadOutcome outcome) {
  const auto read = find(outcome.record);
  if (!read->dropped) {
    read->outcome = std::move(outcome);
    return;
  }
  discard(*read, outcome);
  reads_.erase(read);
}

void LookAhead::discard(const Read& read, const LoadOutcome& outcome) {
  if (outcome.read_bytes > 0) ++counters_.wasted;
  counters_.wasted_bytes += outcome.read_bytes;
  cache_.discard(read.record);
}

}  // namespace zipmoe
