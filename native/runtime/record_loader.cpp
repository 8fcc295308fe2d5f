#include "runtime/record_loader.hpp"

#include <string>
#include <system_error>
#include <utility>

namespace zipmoe {

RecordLoader::RecordLoader(const RecordTable& table, RecordVerifier& verifier, std::unique_ptr<Reader> reader)
    : table_(table), verifier_(verifier), loads_(table.size()), reader_(std::move(reader)) {}

void RecordLoader::start(RecordIndex record, uint8_t* destination) {
  const Record& entry = table_[record];
  submit({.file = entry.file,
          .offset = entry.offset,
          .length = entry.length,
          .destination = destination,
          .tag = record,
          .sink = this},
         table_.places(record, destination), {true, true});
}

void RecordLoader::start_parts(RecordIndex record, const std::array<uint8_t*, 2>& places,
                               const std::array<bool, 2>& missing) {
  const Record& entry = table_[record];
  ReadJob job{.file = entry.file, .offset = entry.offset, .tag = record, .sink = this};
  for (uint32_t extent = 0; extent < entry.extents.size(); ++extent) {
    if (!missing[extent]) continue;
    const Section part = table_.part(record, extent);
    if (job.length == 0) {
      job.offset += part.offset;
      job.destination = places[extent];
    } else {
      job.split = job.length;
      job.rest_destination = places[extent];
    }
    job.length += part.length;
  }
  submit(job, {places[0], places[1]}, missing);
}

void RecordLoader::submit(const ReadJob& job, const PartPlaces& places, const std::array<bool, 2>& missing) {
  {
    std::lock_guard lock(mutex_);
    loads_[job.tag] = {places, missing, job.offset, job.length};
    ++outstanding_;
  }
  reader_->submit(job);
}

std::array<uint64_t, 2> RecordLoader::part_bytes() const {
  std::lock_guard lock(mutex_);
  return part_bytes_;
}

void RecordLoader::read_completed(const ReadCompletion& completion) noexcept {
  std::optional<LoadFailure> failure = examine(completion);
  {
    std::lock_guard lock(mutex_);
    if (completion.error_number == 0) {
      const auto record = static_cast<RecordIndex>(completion.tag);
      for (uint32_t extent = 0; extent < table_[record].extents.size(); ++extent) {
        if (loads_[record].missing[extent]) part_bytes_[extent] += table_.part(record, extent).length;
      }
    }
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
  const Load& load = loads_[record];
  if (completion.bytes < load.length) {
    return LoadFailure{RecordFault::truncated, "only " + std::to_string(completion.bytes) + " of " +
                                                   std::to_string(load.length) + " bytes are there at offset " +
                                                   std::to_string(load.offset)};
  }
  try {
    verifier_.verify(record, load.places, load.missing);
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
