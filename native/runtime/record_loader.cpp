#include "runtime/record_loader.hpp"

#include <string>
#include <system_error>
#include <utility>

namespace zipmoe {

RecordLoader::RecordLoader(const RecordTable& table, RecordVerifier& verifier, std::unique_ptr<Reader> reader)
    : table_(table), verifier_(verifier), destinations_(table.size()), reader_(std::move(reader)) {}

void RecordLoader::start(RecordIndex record, uint8_t* destination) {
  const Record& entry = table_[record];
  {
    std::lock_guard lock(mutex_);
    destinations_[record] = destination;
    ++outstanding_;
  }
  reader_->submit({entry.file, entry.offset, entry.length, destination, record, this});
}

void RecordLoader::read_completed(const ReadCompletion& completion) noexcept {
  std::optional<LoadFailure> failure = examine(completion);
  {
    std::lock_guard lock(mutex_);
    outcomes_.push_back({static_cast<RecordIndex>(completion.tag), std::move(failure)});
  }
  arrived_.notify_one();
}

std::optional<LoadFailure> RecordLoader::examine(const ReadCompletion& completion) const noexcept {
  const auto record = static_cast<RecordIndex>(completion.tag);
  if (completion.error_number != 0) {
    return LoadFailure{RecordFault::read_failed,
                       "read failed: " + std::generic_category().message(completion.error_number)};
  }
  const Record& entry = table_[record];
  if (completion.bytes < entry.length) {
    return LoadFailure{RecordFault::truncated, "only " + std::to_string(completion.bytes) + " of " +
                                                   std::to_string(entry.length) + " bytes are there at offset " +
                                                   std::to_string(entry.offset)};
  }
  try {
    verifier_.verify(record, destinations_[record]);
    return std::nullopt;
  } catch (const RecordError& error) {
    return LoadFailure{error.fault(), error.what()};
  } catch (const std::exception& error) {
    return LoadFailure{RecordFault::invalid_encoding, error.what()};
  }
}

std::optional<LoadOutcome> RecordLoader::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  arrived_.wait_for(lock, timeout, [this] { return !outcomes_.empty(); });
  return take_first();
}

// A wait without time would still pass through the kernel, and its timer slack.
std::optional<LoadOutcome> RecordLoader::poll() {
  std::lock_guard lock(mutex_);
  return take_first();
}

std::optional<LoadOutcome> RecordLoader::take_first() {
  if (outcomes_.empty()) return std::nullopt;
  LoadOutcome outcome = std::move(outcomes_.front());
  outcomes_.pop_front();
  --outstanding_;
  return outcome;
}

uint64_t RecordLoader::outstanding() const {
  std::lock_guard lock(mutex_);
  return outstanding_;
}

}  // namespace zipmoe
