// Brings records from disk to a place in memory: submits the read, verifies the bytes on the reader's thread and hands
// the outcome to whoever waits.
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
  // The next outcome, in order of completion; nothing if none arrived in time.
  std::optional<LoadOutcome> wait(std::chrono::milliseconds timeout);
  // The next outcome if there is one now.
  std::optional<LoadOutcome> poll();
  // Loads that have not begun fail soon; their outcomes must still be taken.
  void cancel() noexcept { reader_->cancel(); }
  // Loads started whose outcome has not been taken.
  uint64_t outstanding() const;

  void read_completed(const ReadCompletion& completion) noexcept override;

  const Reader& reader() const { return *reader_; }
  Reader& reader() { return *reader_; }
  // Bytes of each part (by extent) that were read without an error, dense records included.
  std::array<uint64_t, 2> part_bytes() const;

 private:
  std::optional<LoadOutcome> take_first();
  std::optional<LoadFailure> examine(const ReadCompletion& completion) const noexcept;
  void submit(RecordIndex record, ReadJob job, const PartPlaces& places, const std::array<bool, 2>& missing);

  const RecordTable& table_;
  RecordVerifier& verifier_;
  ArrivalListener* const listener_;
  struct Load {
    RecordIndex record = 0;
    PartPlaces places{};
    std::array<bool, 2> missing{};
    uint64_t offset = 0;  // in the file
    uint64_t length = 0;
  };

  // By tag: the record or, of reads without its first part, that and the number of records. Written before the read is
  // submitted.
  std::vector<Load> loads_;
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<LoadOutcome> outcomes_;
  uint64_t outstanding_ = 0;
  std::array<uint64_t, 2> part_bytes_{};
  std::unique_ptr<Reader> reader_;  // last: its threads use everything above
};

}  // namespace zipmoe
