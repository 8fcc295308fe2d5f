// The dense records: resident from the start, in one piece of the arena, or on disk with their rows read on demand.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/record_loader.hpp"
#include "runtime/record_table.hpp"
#include "runtime/row_decoder.hpp"
#include "runtime/row_reader.hpp"

namespace zipmoe {

struct LoadProgress {
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
  bool finished() const { return bytes_done == bytes_total; }
};

class DenseRecords {
 public:
  // `memory`: resident_bytes() of it, 4096-aligned. `on_demand`: those of `records` that are not resident;
  // `keep_row_details`: see RowReader. The loader must be gone before this is, as it reads to here.
  DenseRecords(const RecordTable& table, std::vector<RecordIndex> records, std::span<const RecordIndex> on_demand,
               bool keep_row_details, VerifyMode verify, RecordLoader& loader, uint8_t* memory);

  static uint64_t resident_bytes(const RecordTable& table, std::span<const RecordIndex> records,
                                 std::span<const RecordIndex> on_demand);

  // Reads the records, some further at every call; throws RecordError.
  LoadProgress load(std::chrono::milliseconds timeout);

  bool on_demand(RecordIndex record) const { return row_reader_ && row_reader_->holds(record); }
  bool resident(RecordIndex record) const { return loaded_[record] && !on_demand(record); }
  // Throws std::logic_error if the record is not loaded. On demand only its index may be looked at.
  MatrixView view(RecordIndex record, uint32_t matrix) const;
  // For rows of records on demand; null if there are none.
  RowReader* row_reader() const { return row_reader_.get(); }

 private:
  bool may_start_next() const;

  const RecordTable& table_;
  const std::vector<RecordIndex> records_;
  RecordLoader& loader_;
  std::unique_ptr<RowReader> row_reader_;
  std::vector<uint8_t*> places_;  // by record; of resident ones
  std::vector<bool> loaded_;      // by record
  size_t started_ = 0;
  uint32_t on_demand_loading_ = 0;
  LoadProgress progress_;
};

}  // namespace zipmoe
