// Decompression of exponents before anybody asks for them: L workers take shards whose E-chunks are in memory, in the
// scheduler's priority order, while the disk is busy or another expert is executed.
//
// Nobody ever waits for a shard that has not begun. A shard that has begun needs neither memory, nor a read, nor a lock
// that anybody else holds while he waits, so it ends; the consumer takes a shard that has not begun away (claim,
// withdraw) and decompresses it himself, without a buffer. So whatever the numbers of buffers, workers and staging
// slots and whatever the order of hand-out, buffers that are all taken delay work, but never block it: an expert
// without a buffer is decoded as if there were no workers.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "codec/planar.hpp"
#include "runtime/layer_order.hpp"
#include "runtime/record_loader.hpp"

namespace zipmoe {

class DecompressAhead final : public ArrivalListener {
 public:
  // `table`: of a separable codec; outlives this.
  DecompressAhead(const RecordTable& table, uint32_t workers);
  ~DecompressAhead() override;
  DecompressAhead(const DecompressAhead&) = delete;
  DecompressAhead& operator=(const DecompressAhead&) = delete;

  // A request begins. `experts`: its records; `priority`: shards by positions in them; `buffers`: each for the
  // exponents of one expert, as RecordTable::exponent_offset lays them out.
  void begin(std::vector<RecordIndex> experts, std::vector<ShardTask> priority, std::vector<uint8_t*> buffers);
  // It is over: waits for the shards that have begun. Idempotent.
  void end();

  // Where the E-chunks of an expert are (`there`), or will be when parts_arrived() is called for them.
  void expect(uint32_t expert, const uint8_t* exponent_part, bool there);
  void parts_arrived(RecordIndex record, const std::array<bool, 2>& parts) noexcept override;
  // The E-chunks of an expert are about to go, or are not needed any more: forgets what was decompressed of it, frees
  // its buffer and waits for the shards that have begun. After end() there is nothing to do.
  void withdraw(uint32_t expert);

  // Whether nothing of the expert is left to be decompressed.
  bool complete(uint32_t expert) const;
  // Decompresses one shard here, if one is ready and fewer than L are under way.
  bool help();

  enum class ShardState : uint8_t { waiting, under_way, done, failed, claimed };
  struct Claim {
    const uint8_t* exponents = nullptr;  // [rows][columns] of the matrix; nullptr: no buffer, all shards are claimed
    std::vector<ShardState> shards;      // of the range; none is `waiting`
  };
  // The caller needs these shards of a matrix now: those that have not begun are his, and no other shard begins until
  // release() is called, because the cores belong to whom somebody waits for.
  Claim claim(uint32_t expert, uint32_t matrix, uint32_t shard_begin, uint32_t shard_end);
  void release();
  // Waits for a shard that was under way; throws FormatError if it could not be decompressed.
  void await(uint32_t expert, uint32_t matrix, uint32_t shard) const;

  struct Counters {
    double seconds = 0;  // summed over threads
    uint64_t bytes = 0;  // of exponents
  };
  Counters counters() const;

 private:
  struct Expert {
    RecordIndex record = 0;
    const uint8_t* exponent_part = nullptr;
    bool there = false;
    uint8_t* buffer = nullptr;
    std::vector<uint32_t> first_shard;  // by matrix, in `shards`
    std::vector<ShardState> shards;
    uint32_t unfinished = 0;  // shards that wait or are under way
    uint32_t under_way = 0;
    std::string failure;
  };

  ShardState& state(const ShardTask& task);
  std::optional<ShardTask> take();
  void decompress(std::unique_lock<std::mutex>& lock, const ShardTask& task);
  void serve();

  const RecordTable& table_;
  const PlanarCodec& codec_;
  const uint32_t workers_;
  mutable std::mutex mutex_;
  std::condition_variable work_;           // for the workers
  mutable std::condition_variable ended_;  // a shard has
  std::vector<Expert> experts_;
  std::vector<ShardTask> priority_;
  size_t first_ = 0;  // in priority_: nothing before it waits
  std::vector<uint8_t*> free_buffers_;
  uint32_t under_way_ = 0;
  bool demanded_ = false;  // between claim() and release()
  bool stopping_ = false;
  Counters counters_;
  std::vector<std::thread> threads_;
};

}  // namespace zipmoe
