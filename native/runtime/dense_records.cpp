#include "runtime/dense_records.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace zipmoe {
namespace {

// Records in flight at once: enough to keep the reader's threads busy.
constexpr uint64_t kLoadsInFlight = 8;
// Records with rows on demand are in memory as a whole while they are loaded. As many as this fit into the scratch and
// the expert slots, which are reserved and not used yet.
constexpr uint32_t kOnDemandLoadsInFlight = 2;

bool contains(std::span<const RecordIndex> records, RecordIndex record) {
  return std::ranges::find(records, record) != records.end();
}

}  // namespace

DenseRecords::DenseRecords(const RecordTable& table, std::vector<RecordIndex> records,
                           std::span<const RecordIndex> on_demand, bool keep_row_details, VerifyMode verify,
                           RecordLoader& loader, uint8_t* memory)
    : table_(table), records_(std::move(records)), loader_(loader), places_(table.size()), loaded_(table.size()) {
  for (const RecordIndex record : on_demand) {
    if (!contains(records_, record)) throw std::invalid_argument("record " + table_[record].name + " is not dense");
  }
  if (!on_demand.empty()) {
    row_reader_ = std::make_unique<RowReader>(table_, on_demand, keep_row_details, verify, loader_.reader());
  }
  for (const RecordIndex record : records_) {
    progress_.bytes_total += table_[record].length;
    if (this->on_demand(record)) continue;
    places_[record] = memory;
    memory += table_[record].length;
  }
}

uint64_t DenseRecords::resident_bytes(const RecordTable& table, std::span<const RecordIndex> records,
                                      std::span<const RecordIndex> on_demand) {
  uint64_t bytes = 0;
  for (const RecordIndex record : records) bytes += contains(on_demand, record) ? 0 : table[record].length;
  return bytes;
}

bool DenseRecords::may_start_next() const {
  if (started_ == records_.size() || loader_.outstanding() >= kLoadsInFlight) return false;
  return !on_demand(records_[started_]) || on_demand_loading_ < kOnDemandLoadsInFlight;
}

LoadProgress DenseRecords::load(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!progress_.finished()) {
    while (may_start_next()) {
      const RecordIndex record = records_[started_++];
      on_demand_loading_ += on_demand(record) ? 1 : 0;
      loader_.start(record, on_demand(record) ? row_reader_->destination(record) : places_[record]);
    }
    const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (remaining.count() <= 0) break;
    const auto outcome = loader_.wait(remaining);
    if (!outcome) break;
    if (outcome->failure) {
      const LoadFailure failure = *outcome->failure;
      // What is under way writes into the memory: let it finish before the caller decides.
      started_ = records_.size();
      while (loader_.outstanding() > 0) loader_.wait(std::chrono::milliseconds(1000));
      throw RecordError(failure.fault, outcome->record, failure.message);
    }
    if (on_demand(outcome->record)) {
      row_reader_->settle(outcome->record);
      --on_demand_loading_;
    }
    loaded_[outcome->record] = true;
    progress_.bytes_done += table_[outcome->record].length;
  }
  return progress_;
}

MatrixView DenseRecords::view(RecordIndex record, uint32_t matrix) const {
  if (!loaded_[record]) throw std::logic_error("record " + table_[record].name + " is not loaded");
  return on_demand(record) ? row_reader_->view(record) : table_.view(record, matrix, places_[record]);
}

}  // namespace zipmoe
