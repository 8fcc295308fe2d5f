// Reads in idle disk time what the next layer will probably ask for. Predictions cost nothing but disk time that nobody
// else wanted, and the slots that the cache spares for them: outside of a pass through all layers they evict nobody
// from the slots that are left to the others. They wait for every other read, and those that turn out wrong are
// dropped.
//
// In a pass that asks every layer for most of its experts (cache/sweep.hpp) two slots are nothing, and what the pass
// has passed, or what later layers hold beyond their share, makes room for the next layer anyway: there it makes room
// for predictions, as soon as the present layer has all the slots that it needs. Those that find none yet are tried
// again as experts are released.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "cache/expert_cache.hpp"
#include "runtime/record_loader.hpp"

namespace zipmoe {

struct LookAheadCounters {
  uint64_t predicted = 0;   // records whose reads were queued
  uint64_t used_bytes = 0;  // of records that were asked for when their reads had begun
  uint64_t wasted = 0;      // records that were read, wholly or in part, and not asked for
  uint64_t wasted_bytes = 0;
};

// Not thread-safe: the executor owns it.
class LookAhead {
 public:
  // All outlive it.
  LookAhead(const RecordTable& table, ExpertCache& cache, RecordLoader& loader)
      : table_(table), cache_(cache), loader_(loader) {}

  // Queues reads for those of which nothing is in memory, the likeliest first, as far as slots are spared. The others
  // do not make room for them.
  void predict(std::span<const RecordIndex> records);
  // The same for the next layer of a pass that goes through all: go_on() begins the reads.
  void predict_in_sweep(std::vector<RecordIndex> records);
  // For the first layer of a pass that is about to begin. A few of them may make others give way who are not predicted.
  void predict_sweep(std::vector<RecordIndex> records);
  // Begins reads that had no slot before; to be called when nobody else waits for slots.
  void go_on();
  // Frees the slots of dropped predictions whose reads have ended; to be called before slots are asked for.
  void collect();

  // A record that is asked for now, whose slot is the caller's from now on, who admits or discards it.
  struct Taken {
    bool begun = true;                   // its read
    std::optional<LoadOutcome> outcome;  // none: the loader will hand it out
  };
  // Nothing if it was not predicted.
  std::optional<Taken> take(RecordIndex record);
  // Nobody asks for the others.
  void drop();
  // The same, until the last of them has left its slot.
  void clear();

  const LookAheadCounters& counters() const { return counters_; }

 private:
  struct Read {
    RecordIndex record;
    bool dropped = false;
    std::optional<LoadOutcome> outcome;
  };

  void go_on(AheadRoom room);
  void start(AheadRoom room, size_t most);
  void receive(LoadOutcome outcome);
  void discard(const Read& read, const LoadOutcome& outcome);
  std::vector<Read>::iterator find(RecordIndex record);

  const RecordTable& table_;
  ExpertCache& cache_;
  RecordLoader& loader_;
  std::vector<Read> reads_;               // those that were dropped stay until they have completed
  std::vector<RecordIndex> predicted_;    // they do not make room for each other
  std::deque<RecordIndex> without_slot_;  // of these: their reads have not been queued
  LookAheadCounters counters_;
};

}  // namespace zipmoe
