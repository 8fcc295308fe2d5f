#include "runtime/record_loader.hpp"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

namespace zipmoe {

RecordLoader::RecordLoader(const RecordTable& table, RecordVerifier& verifier, std::unique_ptr<Reader> reader,
                           ArrivalListener* listener)
    : table_(table),
      verifier_(verifier),
      listener_(listener),
      loads_(2 * static_cast<size_t>(table.size())),
      reader_(std::move(reader)) {}

ReadJob RecordLoader::whole_record(RecordIndex record, uint8_t* destination) {
  const Record& entry = table_[record];
  return {.file = entry.file, .offset = entry.offset, .length = entry.length, .destination = destination, .sink = this};
}

void RecordLoader::start(RecordIndex record, uint8_t* destination) {
  submit(record, whole_record(record, destination), table_.places(record, destination), {true, true});
}

void RecordLoader::start_ahead(RecordIndex record, uint8_t* destination) {
  ReadJob job = whole_record(record, destination);
  job.background = true;
  submit(record, job, table_.places(record, destination), {true, true});
}

RecordLoader::Adopted RecordLoader::adopt(RecordIndex record) {
  const uint64_t tag = record;
  {
    std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(ahead_outcomes_,
                                            [record](const LoadOutcome& outcome) { return outcome.record == record; });
    if (found != ahead_outcomes_.end()) {
      Adopted adopted{.begun = true, .outcome = std::move(*found)};
      ahead_outcomes_.erase(found);
      return adopted;
    }
    loads_[tag].ahead = false;
    ++outstanding_;
  }
  return {.begun = reader_->promote(tag), .outcome = {}};
}

std::optional<LoadOutcome> RecordLoader::take_ahead(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (timeout.count() > 0) arrived_.wait_for(lock, timeout, [this] { return !ahead_outcomes_.empty(); });
  if (ahead_outcomes_.empty()) return std::nullopt;
  LoadOutcome outcome = std::move(ahead_outcomes_.front());
  ahead_outcomes_.pop_front();
  return outcome;
}

void RecordLoader::start_parts(RecordIndex record, const std::array<uint8_t*, 2>& places,
                               const std::array<bool, 2>& missing) {
  const Record& entry = table_[record];
  ReadJob job{.file = entry.file, .offset = entry.offset, .sink = this};
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
  submit(record, job, {places[0], places[1]}, missing);
}

void RecordLoader::submit(RecordIndex record, ReadJob job, const PartPlaces& places,
                          const std::array<bool, 2>& missing) {
  job.tag = missing[0] ? record : uint64_t{table_.size()} + record;
  ExtentChecksums checksums = extent_checksums(record, job, places, missing);
  {
    std::lock_guard lock(mutex_);
    loads_[job.tag] = {record, places, missing, job.offset, job.length, job.background, std::move(checksums)};
    if (!job.background) ++outstanding_;
  }
  reader_->submit(job);
}

std::array<uint64_t, 2> RecordLoader::part_bytes() const {
  std::lock_guard lock(mutex_);
  return part_bytes_;
}

RecordLoader::ExtentChecksums RecordLoader::extent_checksums(RecordIndex record, const ReadJob& job,
                                                             const PartPlaces& places,
                                                             const std::array<bool, 2>& missing) const {
  const Record& entry = table_[record];
  ExtentChecksums checksums;
  for (size_t part = 0; part < entry.extents.size(); ++part) {
    if (!missing[part] || !verifier_.wants_checksum(record, part)) continue;
    const Extent& extent = entry.extents[part];
    checksums[part] =
        std::make_unique<ExtentChecksum>(entry.offset + extent.offset - job.offset, extent.length, places[part]);
  }
  return checksums;
}

void RecordLoader::chunk_read(uint64_t tag, uint64_t begin, uint64_t length) noexcept {
  for (const std::unique_ptr<ExtentChecksum>& extent : loads_[tag].checksums) {
    if (!extent) continue;
    const uint64_t first = std::max(begin, extent->begin);
    const uint64_t end = std::min(begin + length, extent->begin + extent->length);
    if (first < end) extent->checksum.arrived(first - extent->begin, end - extent->begin);
  }
}

void RecordLoader::read_completed(const ReadCompletion& completion) noexcept {
  Load& load = loads_[completion.tag];
  const ExtentChecksums checksums = std::move(load.checksums);
  std::optional<LoadFailure> failure = examine(completion, checksums);
  for (const std::unique_ptr<ExtentChecksum>& extent : checksums) {
    if (extent) verifier_.count_nanoseconds(extent->checksum.nanoseconds());
  }
  if (!failure && listener_ != nullptr) listener_->parts_arrived(load.record, load.missing);
  {
    std::lock_guard lock(mutex_);
    if (completion.error_number == 0) {
      for (uint32_t extent = 0; extent < table_[load.record].extents.size(); ++extent) {
        if (load.missing[extent]) part_bytes_[extent] += table_.part(load.record, extent).length;
      }
    }
    (load.ahead ? ahead_outcomes_ : outcomes_)
        .push_back({load.record, load.missing, std::move(failure), completion.bytes});
  }
  arrived_.notify_one();
}

std::optional<LoadFailure> RecordLoader::examine(const ReadCompletion& completion,
                                                 const ExtentChecksums& checksums) const noexcept {
  if (completion.error_number != 0) {
    return LoadFailure{RecordFault::read_failed,
                       "read failed: " + std::generic_category().message(completion.error_number)};
  }
  const Load& load = loads_[completion.tag];
  if (completion.bytes < load.length) {
    return LoadFailure{RecordFault::truncated, "only " + std::to_string(completion.bytes) + " of " +
                                                   std::to_string(load.length) + " bytes are there at offset " +
                                                   std::to_string(load.offset)};
  }
  try {
    RecordVerifier::Checksums found;
    for (size_t part = 0; part < found.size(); ++part) {
      if (checksums[part]) found[part] = checksums[part]->checksum.finish();
    }
    verifier_.verify(load.record, load.places, load.missing, found);
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
