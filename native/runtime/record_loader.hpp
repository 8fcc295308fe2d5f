// Brings records from disk to a place in memory: submits the read, verifies the bytes on the reader's thread and hands
// the outcome to whoever waits.
#pragma once

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
  std::optional<LoadFailure> failure;  // none: the record is there and may be decoded
};

class RecordLoader final : public ReadSink {
 public:
  RecordLoader(const RecordTable& table, RecordVerifier& verifier, std::unique_ptr<Reader> reader);

  // `destination`: room for the record, 4096-aligned, with 64 readable bytes after it. At most one load per record.
  void start(RecordIndex record, uint8_t* destination);
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

 private:
  std::optional<LoadOutcome> take_first();
  std::optional<LoadFailure> examine(const ReadCompletion& completion) const noexcept;

  const RecordTable& table_;
  RecordVerifier& verifier_;
  std::vector<uint8_t*> destinations_;  // by record; written before the read is submitted
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<LoadOutcome> outcomes_;
  uint64_t outstanding_ = 0;
  std::unique_ptr<Reader> reader_;  // last: its threads use everything above
};

}  // namespace zipmoe
