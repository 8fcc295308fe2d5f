// The request on one pool of whole records: experts are handed out as they become resident, each pinned until the next
// one is asked for. Hits come first, then misses as their reads complete; or all of them strictly ascending.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "cache/expert_cache.hpp"
#include "runtime/layer_request.hpp"
#include "runtime/look_ahead.hpp"
#include "runtime/record_loader.hpp"

namespace zipmoe {

class ExpertRequest final : public LayerRequest {
 public:
  // `records` must be distinct. Pins the hits and starts as many reads as there are slots. Takes over what `ahead` has
  // read of them, and drops the rest; none: nullptr.
  ExpertRequest(ExpertCache& cache, RecordLoader& loader, std::vector<RecordIndex> records, HandOutOrder order,
                LookAhead* ahead = nullptr);
  // Cancels reads that have not begun and waits for the others; what arrived intact stays resident.
  ~ExpertRequest() override;
  ExpertRequest(const ExpertRequest&) = delete;
  ExpertRequest& operator=(const ExpertRequest&) = delete;

  RequestStep next(std::chrono::milliseconds timeout) override;
  bool take_all() override;
  // When all of its own have begun, those of `ahead` go on.
  void begin_reads() override;
  uint64_t hits() const override { return hits_; }
  uint64_t misses() const override { return items_.size() - hits_ - prefetched_; }
  uint64_t prefetched() const override { return prefetched_; }
  double wait_seconds() const override { return wait_seconds_; }

 private:
  enum class State : uint8_t { hit, unissued, reading, ready, handed_out, released };
  struct Item {
    RecordIndex record;
    uint32_t position;
    State state;
  };

  void take_over();
  void make_room_for_head();
  void settle(const LoadOutcome& outcome);
  Spared spared() const;
  std::optional<size_t> choose() const;
  void release_current();

  ExpertCache& cache_;
  RecordLoader& loader_;
  LookAhead* const ahead_;
  const HandOutOrder order_;
  std::vector<Item> items_;   // in the order of handing out (ascending), or hits first
  std::deque<size_t> ready_;  // misses that arrived, in order of arrival (as_available)
  size_t next_unissued_ = 0;  // reads are issued in the order of items_
  size_t head_ = 0;           // ascending: the next item; as_available: the next hit
  uint64_t prefetched_ = 0;
  uint64_t hits_ = 0;
  uint64_t reading_ = 0;
  uint64_t pending_ = 0;  // reading, or ready
  uint64_t left_ = 0;     // items not yet handed out
  std::optional<size_t> current_;
  std::optional<LoadFailure> failure_;
  RecordIndex failed_record_ = 0;
  double wait_seconds_ = 0;
};

}  // namespace zipmoe
