// One sparse layer's need for experts: hands them out one by one as they become resident, each pinned until the next
// one is asked for. Hits come first, then misses as their reads complete; or all of them strictly ascending.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "cache/expert_cache.hpp"
#include "runtime/record_loader.hpp"

namespace zipmoe {

enum class HandOutOrder : uint8_t { as_available, ascending };

struct RequestStep {
  enum class Kind : uint8_t { record, waiting, finished };
  Kind kind;
  uint32_t position = 0;  // in the list of records that the request was made with
};

class ExpertRequest {
 public:
  // `records` must be distinct. Pins the hits and starts as many reads as there are slots.
  ExpertRequest(ExpertCache& cache, RecordLoader& loader, std::vector<RecordIndex> records, HandOutOrder order);
  // Cancels reads that have not begun and waits for the others; what arrived intact stays resident.
  ~ExpertRequest();
  ExpertRequest(const ExpertRequest&) = delete;
  ExpertRequest& operator=(const ExpertRequest&) = delete;

  // Releases the expert handed out before and returns the next one, or `waiting` when none became resident in time.
  // Throws RecordError when a record cannot be read; the request is over then.
  RequestStep next(std::chrono::milliseconds timeout);

  uint64_t hits() const { return hits_; }
  uint64_t misses() const { return items_.size() - hits_; }
  // Time that callers spent in next() waiting for reads.
  double wait_seconds() const { return wait_seconds_; }

 private:
  enum class State : uint8_t { hit, unissued, reading, ready, handed_out, released };
  struct Item {
    RecordIndex record;
    uint32_t position;
    State state;
  };

  void issue_reads();
  void make_room_for_head();
  void settle(const LoadOutcome& outcome);
  std::optional<size_t> choose() const;
  void release_current();

  ExpertCache& cache_;
  RecordLoader& loader_;
  const HandOutOrder order_;
  std::vector<Item> items_;   // in the order of handing out (ascending), or hits first
  std::deque<size_t> ready_;  // misses that arrived, in order of arrival (as_available)
  size_t next_unissued_ = 0;  // reads are issued in the order of items_
  size_t head_ = 0;           // ascending: the next item; as_available: the next hit
  uint64_t hits_ = 0;
  uint64_t reading_ = 0;
  uint64_t left_ = 0;  // items not yet handed out
  std::optional<size_t> current_;
  std::optional<LoadFailure> failure_;
  RecordIndex failed_record_ = 0;
  double wait_seconds_ = 0;
};

}  // namespace zipmoe
