// Brings records from disk to a place in memory: submits the read, verifies the bytes on the reader's threads, as far
// as possible while the read is under way, and hands the outcome to whoever waits.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "codec/arriving_checksum.hpp"
#include "io/reader.hpp"
#include "runtime/record_table.hpp"
#include "runtime/record_verifier.hpp"

namespace zipmoe {

struct LoadFailure {
  RecordFault fault;
  std::string message;
};

struct LoadOutcome {
  RecordIndex record = 0;
  std::array<bool, 2> parts{};         // that were read, by extent
  std::optional<LoadFailure> failure;  // none: they are there and verified
  uint64_t read_bytes = 0;
};

// Hears of parts that are there and verified before anybody takes the outcome, on a thread of the reader. Must not
// block for long.
class ArrivalListener {
 public:
  virtual ~ArrivalListener() = default;
  virtual void parts_arrived(RecordIndex record, const std::array<bool, 2>& parts) noexcept = 0;
};

class RecordLoader final : public ReadSink {
 public:
  // `listener`: outlives the loader; none: nullptr.
  RecordLoader(const RecordTable& table, RecordVerifier& verifier, std::unique_ptr<Reader> reader,
               ArrivalListener* listener = nullptr);

  // `destination`: room for the record, 4096-aligned, with 64 readable bytes after it. At most one load at a time
  // of a part of a record.
  void start(RecordIndex record, uint8_t* destination);
  // Reads the parts (by extent) that are `missing`, each to its place, all of them in one read; the other parts have
  // places, too, whether they are there or on their way. For records whose parts begin at multiples of 4096.
  void start_parts(RecordIndex record, const std::array<uint8_t*, 2>& places, const std::array<bool, 2>& missing);
  // Like start(), in the background, for a record that may turn out not to be needed.
  void start_ahead(RecordIndex record, uint8_t* destination);
  // Such a load becomes an ordinary one, unless its outcome is there already.
  struct Adopted {
    bool begun = true;  // some of it had been read, or was being read
    std::optional<LoadOutcome> outcome;
  };
  Adopted adopt(RecordIndex record);
  // Of the loads in the background, what has not begun fails soon; their outcomes must still be taken.
  void cancel_ahead() noexcept { reader_->cancel_background(); }
  // The next outcome of a load in the background; without a timeout only if there is one now.
  std::optional<LoadOutcome> take_ahead(std::chrono::milliseconds timeout = {});
  // The next outcome, in order of completion; nothing if none arrived in time. Not of loads in the background.
  std::optional<LoadOutcome> wait(std::chrono::milliseconds timeout);
  // The next outcome if there is one now.
  std::optional<LoadOutcome> poll();
  // Ordinary loads that have not begun fail soon; their outcomes must still be taken.
  void cancel() noexcept { reader_->cancel(); }
  // Ordinary loads started whose outcome has not been taken.
  uint64_t outstanding() const;

  void chunk_read(uint64_t tag, uint64_t begin, uint64_t length) noexcept override;
  void read_completed(const ReadCompletion& completion) noexcept override;

  const Reader& reader() const { return *reader_; }
  Reader& reader() { return *reader_; }
  // Bytes of each part (by extent) that were read without an error, dense records included.
  std::array<uint64_t, 2> part_bytes() const;

 private:
  std::optional<LoadOutcome> take_first();
  // Of an extent that is being read, by what the verifier will ask for.
  struct ExtentChecksum {
    uint64_t begin;  // position in the read
    uint64_t length;
    ArrivingChecksum checksum;
    ExtentChecksum(uint64_t first, uint64_t bytes, const uint8_t* data)
        : begin(first), length(bytes), checksum(data, bytes) {}
  };
  // One read of a record. A failed or cancelled one takes what it has of checksums with it.
  using ExtentChecksums = std::array<std::unique_ptr<ExtentChecksum>, 2>;

  ExtentChecksums extent_checksums(RecordIndex record, const ReadJob& job, const PartPlaces& places,
                                   const std::array<bool, 2>& missing) const;
  std::optional<LoadFailure> examine(const ReadCompletion& completion, const ExtentChecksums& checksums) const noexcept;
  void submit(RecordIndex record, ReadJob job, const PartPlaces& places, const std::array<bool, 2>& missing);
  ReadJob whole_record(RecordIndex record, uint8_t* destination);

  const RecordTable& table_;
  RecordVerifier& verifier_;
  ArrivalListener* const listener_;
  struct Load {
    RecordIndex record = 0;
    PartPlaces places{};
    std::array<bool, 2> missing{};
    uint64_t offset = 0;  // in the file
    uint64_t length = 0;
    bool ahead = false;  // guarded by the mutex; the others are written before the read is submitted
    ExtentChecksums checksums{};
  };

  // By tag: the record or, of reads without its first part, that and the number of records.
  std::vector<Load> loads_;
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<LoadOutcome> outcomes_;
  std::deque<LoadOutcome> ahead_outcomes_;
  uint64_t outstanding_ = 0;
  std::array<uint64_t, 2> part_bytes_{};
  std::unique_ptr<Reader> reader_;  // last: its threads use everything above
};

}  // namespace zipmoe
