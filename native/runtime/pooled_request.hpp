// The request on the pools F, C, S and E. What an expert has in memory decides what is read; where it goes when it has
// been executed is decided when the request begins, so that it does not depend on the order in which reads complete.
#pragma once

#include <array>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/layer_pools.hpp"
#include "cache/pool_memory.hpp"
#include "runtime/decompress_ahead.hpp"
#include "runtime/layer_order.hpp"
#include "runtime/layer_request.hpp"
#include "runtime/record_loader.hpp"
#include "runtime/row_decoder.hpp"

namespace zipmoe {

// What a request works with; everything outlives it.
struct PoolContext {
  const RecordTable& table;
  PoolMemory& memory;
  LayerPools& dispatch;  // of the request's group
  RecordLoader& loader;
  RowDecoder& decoder;
  DecompressAhead* ahead = nullptr;  // none: exponents are decompressed when a matrix is asked for
  uint32_t workers = 1;              // of the decoder
  ReadRates rates;
  OrderKind read_order = OrderKind::cache_affinity;
};

class PooledRequest final : public LayerRequest {
 public:
  // `records`: distinct experts of one group; `tokens`: routed to each, or empty. Starts as many reads as fit.
  PooledRequest(const PoolContext& context, std::vector<RecordIndex> records, std::vector<uint32_t> tokens,
                HandOutOrder order);
  // Cancels reads that have not begun, waits for the others and brings everybody to where he belongs.
  ~PooledRequest() override;
  PooledRequest(const PooledRequest&) = delete;
  PooledRequest& operator=(const PooledRequest&) = delete;

  RequestStep next(std::chrono::milliseconds timeout) override;
  uint64_t hits() const override { return by_residency_[0] + by_residency_[1]; }
  uint64_t misses() const override { return items_.size() - hits(); }
  double wait_seconds() const override { return wait_seconds_; }

  // Requested experts by what of them was in memory, in the order of Residency.
  const std::array<uint64_t, kPools + 1>& by_residency() const { return by_residency_; }
  // Where the parts of the expert handed out last are, unless it is in F.
  PartPlaces current_places() const;
  // Rows of a matrix of it.
  void decode(uint32_t matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out);
  uint64_t decoded_bytes() const { return decoded_bytes_; }
  // Of these, bytes whose exponents were decompressed before they were asked for.
  uint64_t ready_bytes() const { return ready_bytes_; }
  double decode_seconds() const { return decode_seconds_; }

 private:
  enum class State : uint8_t { unissued, reading, ready, handed_out, failed, released };
  struct Item {
    RecordIndex record;
    uint32_t expert;  // in the group
    uint32_t position;
    uint32_t tokens;
    State state;
    Residency destination;
    StagedParts staged;
    uint32_t under_way = 0;              // reads
    std::array<bool, kPartsMax> left{};  // parts that are to arrive
  };

  // Moves of experts that were not asked for, by number in the group: who makes room does so at once. Returns those
  // that go from F to S, with slots for their SM-chunks.
  std::vector<std::pair<RecordIndex, StagedParts>> move_others(uint32_t group,
                                                               const std::unordered_map<uint32_t, Residency>& moves);
  LayerOrder order_of_work() const;
  void start_decompressing(std::vector<ShardTask> priority);
  bool start_read(const PartRead& read, bool& blocked);
  void issue_reads();
  void make_room();
  void settle(const LoadOutcome& outcome);
  std::optional<uint32_t> choose() const;
  void hand_out(uint32_t chosen);
  void decode_into_full_pool(uint32_t index);
  void withdraw(const Item& item);
  void decode_rows(uint32_t index, uint32_t matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out);
  void release_current();
  bool keep_what_is_there(Item& item);

  const PoolContext context_;
  const HandOutOrder order_;
  std::vector<Item> items_;
  std::vector<PartRead> reads_;  // not yet begun, in their order; those of items that need none any more are skipped
  std::deque<uint32_t>
      ready_;          // as_available: items in F, then the others in the order in which their parts were there
  uint32_t head_ = 0;  // ascending: the next item
  uint64_t reading_ = 0;
  uint64_t left_ = 0;  // items not yet handed out
  std::optional<uint32_t> current_;
  std::optional<LoadFailure> failure_;
  RecordIndex failed_record_ = 0;
  std::array<uint64_t, kPools + 1> by_residency_{};
  uint64_t decoded_bytes_ = 0;
  uint64_t ready_bytes_ = 0;
  double decode_seconds_ = 0;
  double wait_seconds_ = 0;
};

}  // namespace zipmoe
