// Rows of dense matrices that are not resident: the pages that hold them are read when they are looked up, verified,
// decoded and given back. What stays in memory is one checksum per page and the part of each record that tells where
// its rows lie; if the caller wants it, also what nearly every row needs a little of (FX3: the exceptions), so that a
// row is one read.
//
// The extents' checksums cover whole records, so nothing less than a record could be verified against the manifest.
// Therefore every record is read once at the start, verified as ever, and its pages are hashed while it is there.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cache/sparse_region.hpp"
#include "io/reader.hpp"
#include "runtime/record_error.hpp"
#include "runtime/record_table.hpp"
#include "runtime/record_verifier.hpp"
#include "runtime/row_decoder.hpp"

namespace zipmoe {

class RowReader final : public ReadSink {
 public:
  // `records`: blocks of rows, with one matrix each. With VerifyMode::always every page is verified whenever it is
  // read; otherwise only the whole records are, at the start (a page that changes later may decode to wrong numbers, as
  // records do that are read again, but never touches other memory). `reader` must outlive the calls below.
  RowReader(const RecordTable& table, std::span<const RecordIndex> records, bool keep_details, VerifyMode verify,
            Reader& reader);

  // Memory that these records take at most: what stays, and the pages of the rows at hand.
  static uint64_t reserved_bytes(const RecordTable& table, std::span<const RecordIndex> records);
  // What is added to it by keeping details.
  static uint64_t details_bytes(const RecordTable& table, std::span<const RecordIndex> records);

  bool holds(RecordIndex record) const { return places_.contains(record); }
  // Where the whole record is to be read to, with 64 readable bytes after it.
  uint8_t* destination(RecordIndex record) const { return region_.data() + places_.at(record).offset; }
  // The whole record was read and verified: takes the checksums of its pages and gives them back, all but those that
  // stay.
  void settle(RecordIndex record);
  // The matrix of a settled record. Only its index may be looked at.
  MatrixView view(RecordIndex record) const { return table_.view(record, 0, destination(record)); }

  // Rows of one record into `out` [row_end - row_begin][columns], with no more pages in memory at once than are
  // reserved. Returns the seconds that the caller waited for pages. Throws RecordError. One call at a time.
  double decode(RecordIndex record, uint64_t row_begin, uint64_t row_end, uint16_t* out, RowDecoder& decoder);
  // The same for rows of a matrix that is cut into `blocks`, in any order, into `out` [rows.size()][columns]; the
  // numbers must be in range.
  double gather(std::span<const RecordIndex> blocks, std::span<const int64_t> rows, uint16_t* out, RowDecoder& decoder);

  // Bytes of each part (by extent) that were read for rows.
  std::array<uint64_t, 2> part_bytes() const;
  double verify_seconds() const;

  void read_completed(const ReadCompletion& completion) noexcept override;

 private:
  struct Pages {
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  struct Place {
    uint64_t offset = 0;        // in the region
    std::array<Pages, 2> kept;  // pages that stay in memory, in their order: the index, and details
    std::vector<uint64_t> checksums;
  };
  // Pages begin .. end - 1 of a record.
  struct PageRun {
    RecordIndex record;
    uint64_t begin;
    uint64_t end;
    bool operator==(const PageRun&) const = default;
  };
  class Loan;

  static Pages index_pages(const RecordTable& table, RecordIndex record);
  static Pages details_pages(const RecordTable& table, RecordIndex record);
  static uint64_t added_pages(const std::vector<PageRun>& wanted, const std::vector<PageRun>& previous);

  std::vector<PageRun> pages_of(RecordIndex record, uint64_t row_begin, uint64_t row_end) const;
  std::vector<PageRun> absent_pages(std::vector<PageRun> wanted) const;
  bool kept_between(const PageRun& run, const PageRun& next) const;
  double fetch(const std::vector<PageRun>& runs);
  void release(const std::vector<PageRun>& runs) noexcept;
  void examine(const PageRun& run, const ReadCompletion& completion) const;
  uint64_t piece_end(RecordIndex record, uint64_t row_begin, uint64_t row_end) const;

  const RecordTable& table_;
  const VerifyMode verify_;
  Reader& reader_;
  const uint64_t pages_max_;  // in memory at once, unless one row needs more
  std::map<RecordIndex, Place> places_;
  SparseRegion region_;
  std::vector<PageRun> jobs_;  // of the fetch under way; a read's tag is its position
  mutable std::mutex mutex_;
  std::condition_variable completed_;
  uint64_t outstanding_ = 0;
  std::optional<RecordError> failure_;
  std::array<uint64_t, 2> part_bytes_{};
  double verify_seconds_ = 0;
};

}  // namespace zipmoe
