#include "runtime/row_reader.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "cache/arena.hpp"
#include "codec/checksum.hpp"

namespace zipmoe {
namespace {

using Clock = std::chrono::steady_clock;

// Pages of rows in memory at once: some hundred rows, and more than the disk's queue.
constexpr uint64_t kTransientBytes = uint64_t{8} << 20;
// Longer runs of pages are several reads, so that several threads verify them.
constexpr uint64_t kReadPages = (uint64_t{1} << 20) / kPageBytes;
// A page's checksum, and its entry in the system's page table, which the first read leaves behind.
constexpr uint64_t kBytesPerAbsentPage = 16;
// Details longer than this part of their record are not kept: FX3's exceptions are about a fiftieth of a table.
constexpr uint64_t kDetailsDivisor = 8;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Bytes at the beginning of the record's matrix that stay in memory.
uint64_t index_bytes(const RecordTable& table, RecordIndex record) {
  const RecordMatrix& matrix = table[record].matrices.front();
  const auto access = table.codec().row_access(matrix.shape, matrix.shard_bytes);
  return access ? std::min(access->index_bytes, matrix.sections.front().length) : 0;
}

// The pages that one row needs: every range of its bytes may begin and end in the middle of a page.
uint64_t row_bytes_max(const RecordTable& table, RecordIndex record) {
  const RecordMatrix& matrix = table[record].matrices.front();
  const auto access = table.codec().row_access(matrix.shape, matrix.shard_bytes);
  if (!access) return table[record].length;
  return std::min(table[record].length, access->row_bytes_max + 2 * access->ranges_max * kPageBytes);
}

uint64_t transient_bytes(const RecordTable& table, std::span<const RecordIndex> records) {
  uint64_t longest_row = 0;
  uint64_t longest_record = 0;
  for (const RecordIndex record : records) {
    longest_row = std::max(longest_row, row_bytes_max(table, record));
    longest_record = std::max(longest_record, table[record].length);
  }
  return std::min(longest_record, std::max(kTransientBytes, longest_row));
}

uint64_t address_space(const RecordTable& table, std::span<const RecordIndex> records) {
  uint64_t bytes = 0;
  for (const RecordIndex record : records) {
    if (table[record].matrices.size() != 1) {
      throw std::invalid_argument("record " + table[record].name + " is not a block of one matrix");
    }
    bytes += table[record].length + kReadableTailBytes;
  }
  return bytes;
}

}  // namespace

// Pages that are in memory as long as this lives.
class RowReader::Loan {
 public:
  Loan(RowReader& owner, std::vector<PageRun> wanted) : owner_(owner), runs_(owner.absent_pages(std::move(wanted))) {
    try {
      waited_ = owner_.fetch(runs_);
    } catch (...) {
      owner_.release(runs_);
      throw;
    }
  }
  ~Loan() { owner_.release(runs_); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  double waited() const { return waited_; }

 private:
  RowReader& owner_;
  std::vector<PageRun> runs_;
  double waited_ = 0;
};

RowReader::RowReader(const RecordTable& table, std::span<const RecordIndex> records, bool keep_details,
                     VerifyMode verify, Reader& reader)
    : table_(table),
      verify_(verify),
      reader_(reader),
      pages_max_(transient_bytes(table, records) / kPageBytes),
      region_(address_space(table, records)) {
  uint64_t offset = 0;
  for (const RecordIndex record : records) {
    Place place{.offset = offset, .kept = {index_pages(table, record)}, .checksums = {}};
    place.kept[1] = keep_details ? details_pages(table, record) : Pages{place.kept[0].end, place.kept[0].end};
    if (!places_.emplace(record, std::move(place)).second) {
      throw std::invalid_argument("record " + table[record].name + " is named twice");
    }
    offset += table[record].length + kReadableTailBytes;
  }
}

// Whole pages around the index.
RowReader::Pages RowReader::index_pages(const RecordTable& table, RecordIndex record) {
  const uint64_t begin = table[record].matrices.front().sections.front().offset;
  const uint64_t bytes = index_bytes(table, record);
  if (bytes == 0) return {0, 0};
  return {begin / kPageBytes, round_up(begin + bytes, kPageBytes) / kPageBytes};
}

// Whole pages around the details, behind those of the index; empty if there are none that are worth keeping.
RowReader::Pages RowReader::details_pages(const RecordTable& table, RecordIndex record) {
  const RecordMatrix& matrix = table[record].matrices.front();
  const Section& section = matrix.sections.front();
  const auto access = table.codec().row_access(matrix.shape, matrix.shard_bytes);
  const uint64_t index_end = index_pages(table, record).end;
  if (!access || access->details_offset >= section.length) return {index_end, index_end};
  const uint64_t begin = (section.offset + access->details_offset) / kPageBytes;
  const uint64_t end = round_up(section.offset + section.length, kPageBytes) / kPageBytes;
  if ((end - begin) * kPageBytes > table[record].length / kDetailsDivisor) return {index_end, index_end};
  return {std::max(begin, index_end), std::max(end, index_end)};
}

uint64_t RowReader::reserved_bytes(const RecordTable& table, std::span<const RecordIndex> records) {
  uint64_t bytes = transient_bytes(table, records);
  for (const RecordIndex record : records) {
    const auto [begin, end] = index_pages(table, record);
    bytes += (end - begin) * kPageBytes + table[record].length / kPageBytes * kBytesPerAbsentPage;
  }
  return bytes;
}

uint64_t RowReader::details_bytes(const RecordTable& table, std::span<const RecordIndex> records) {
  uint64_t bytes = 0;
  for (const RecordIndex record : records) {
    const auto [begin, end] = details_pages(table, record);
    bytes += (end - begin) * kPageBytes;
  }
  return bytes;
}

void RowReader::settle(RecordIndex record) {
  Place& place = places_.at(record);
  const uint64_t pages = table_[record].length / kPageBytes;
  if (verify_ == VerifyMode::always) {
    place.checksums.resize(pages);
    const uint8_t* page = destination(record);
    for (uint64_t i = 0; i < pages; ++i, page += kPageBytes) place.checksums[i] = xxh3_64({page, kPageBytes});
  }
  const auto& [index, details] = place.kept;
  release({{record, 0, index.begin}, {record, index.end, details.begin}, {record, details.end, pages}});
}

// Whether pages stay that lie between two runs of one record.
bool RowReader::kept_between(const PageRun& run, const PageRun& next) const {
  return std::ranges::any_of(places_.at(run.record).kept, [&](const Pages& kept) {
    return kept.begin < kept.end && kept.begin >= run.end && kept.end <= next.begin;
  });
}

// Runs in ascending order, as absent_pages() returns them. What lies between two of them is not in memory unless it
// stays there, so one call gives back all up to the next page that does: every call also interrupts the other threads,
// whose processors must forget the pages.
void RowReader::release(const std::vector<PageRun>& runs) noexcept {
  for (size_t i = 0; i < runs.size();) {
    const PageRun& first = runs[i];
    uint64_t end = first.end;
    for (++i; i < runs.size() && runs[i].record == first.record && !kept_between(runs[i - 1], runs[i]); ++i) {
      end = runs[i].end;
    }
    region_.release(places_.at(first.record).offset + first.begin * kPageBytes, (end - first.begin) * kPageBytes);
  }
}

// A run is empty where all of its pages stay in memory.
std::vector<RowReader::PageRun> RowReader::pages_of(RecordIndex record, uint64_t row_begin, uint64_t row_end) const {
  const std::vector<Section>& sections = table_[record].matrices.front().sections;
  const std::array<Pages, 2>& kept = places_.at(record).kept;
  std::vector<PageRun> runs;
  for (const SectionRange& range : table_.codec().row_ranges(view(record), row_begin, row_end)) {
    const uint64_t begin = sections[range.section].offset + range.begin;
    const uint64_t end = sections[range.section].offset + range.end;
    const uint64_t first_page = begin / kPageBytes;
    const uint64_t end_page = round_up(end, kPageBytes) / kPageBytes;
    const bool absent =
        begin < end &&
        std::ranges::none_of(
            kept, [&](const Pages& pages) { return pages.begin <= first_page && end_page <= pages.end; });
    runs.push_back({record, first_page, absent ? end_page : first_page});
  }
  return runs;
}

// Pages of a row besides those of the row before it in the same batch. Rows come in ascending order and so do their
// pages in each range; where they do not, pages are counted twice at worst.
uint64_t RowReader::added_pages(const std::vector<PageRun>& wanted, const std::vector<PageRun>& previous) {
  uint64_t pages = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const PageRun& run = wanted[i];
    uint64_t begin = run.begin;
    if (i < previous.size() && previous[i].begin <= begin) begin = std::clamp(previous[i].end, begin, run.end);
    pages += run.end - begin;
  }
  return pages;
}

// Each page once, in ascending order, without those that stay in memory.
std::vector<RowReader::PageRun> RowReader::absent_pages(std::vector<PageRun> wanted) const {
  std::sort(wanted.begin(), wanted.end(), [](const PageRun& a, const PageRun& b) {
    return std::pair(a.record, a.begin) < std::pair(b.record, b.begin);
  });
  std::vector<PageRun> runs;
  const auto add = [&](const PageRun& run) {
    if (run.begin >= run.end) return;
    if (!runs.empty() && runs.back().record == run.record && run.begin <= runs.back().end) {
      runs.back().end = std::max(runs.back().end, run.end);
    } else {
      runs.push_back(run);
    }
  };
  for (const PageRun& run : wanted) {
    uint64_t begin = run.begin;
    for (const Pages& kept : places_.at(run.record).kept) {
      add({run.record, begin, std::min(run.end, kept.begin)});
      begin = std::max(begin, kept.end);
    }
    add({run.record, begin, run.end});
  }
  return runs;
}

double RowReader::fetch(const std::vector<PageRun>& runs) {
  const Clock::time_point begin = Clock::now();
  jobs_.clear();
  for (const PageRun& run : runs) {
    for (uint64_t page = run.begin; page < run.end; page += kReadPages) {
      jobs_.push_back({run.record, page, std::min(run.end, page + kReadPages)});
    }
  }
  std::vector<ReadJob> reads;
  reads.reserve(jobs_.size());
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const PageRun& run = jobs_[i];
    reads.push_back({.file = table_[run.record].file,
                     .offset = table_[run.record].offset + run.begin * kPageBytes,
                     .length = (run.end - run.begin) * kPageBytes,
                     .destination = destination(run.record) + run.begin * kPageBytes,
                     .tag = i,
                     .sink = this});
  }
  failure_.reset();
  outstanding_ = reads.size();
  reader_.submit_all(reads);
  std::unique_lock lock(mutex_);
  completed_.wait(lock, [this] { return outstanding_ == 0; });
  if (failure_) throw RecordError(*failure_);
  return seconds_since(begin);
}

void RowReader::read_completed(const ReadCompletion& completion) noexcept {
  const PageRun& run = jobs_[completion.tag];
  const Clock::time_point begin = Clock::now();
  std::optional<RecordError> failure;
  try {
    examine(run, completion);
  } catch (const RecordError& error) {
    failure = error;
  } catch (const std::exception& error) {
    failure.emplace(RecordFault::read_failed, run.record, error.what());
  }
  std::lock_guard lock(mutex_);
  verify_seconds_ += seconds_since(begin);
  if (failure && !failure_) failure_ = std::move(failure);
  if (completion.error_number == 0) {
    const std::vector<Extent>& extents = table_[run.record].extents;
    const bool second = extents.size() > 1 && run.begin * kPageBytes >= extents[1].offset;
    part_bytes_[second ? 1 : 0] += completion.bytes;
  }
  if (--outstanding_ == 0) completed_.notify_one();
}

void RowReader::examine(const PageRun& run, const ReadCompletion& completion) const {
  const uint64_t file_offset = table_[run.record].offset + run.begin * kPageBytes;
  const uint64_t length = (run.end - run.begin) * kPageBytes;
  if (completion.error_number != 0) {
    throw RecordError(RecordFault::read_failed, run.record,
                      "read failed: " + std::generic_category().message(completion.error_number));
  }
  if (completion.bytes < length) {
    throw RecordError(RecordFault::truncated, run.record,
                      "only " + std::to_string(completion.bytes) + " of " + std::to_string(length) +
                          " bytes are there at offset " + std::to_string(file_offset));
  }
  if (verify_ != VerifyMode::always) return;
  const Place& place = places_.at(run.record);
  for (uint64_t page = run.begin; page < run.end; ++page) {
    if (xxh3_64({destination(run.record) + page * kPageBytes, kPageBytes}) == place.checksums[page]) continue;
    throw RecordError(RecordFault::checksum_mismatch, run.record,
                      "the checksum of the " + std::to_string(kPageBytes) + " bytes at offset " +
                          std::to_string(table_[run.record].offset + page * kPageBytes) +
                          " is not what it was when the model was loaded");
  }
}

// The most rows from row_begin on whose pages may be in memory at once: whole units of the codec, at least one.
uint64_t RowReader::piece_end(RecordIndex record, uint64_t row_begin, uint64_t row_end) const {
  const MatrixView matrix = view(record);
  uint64_t rows = row_end - row_begin;
  for (;;) {
    uint64_t end = row_begin + rows;
    if (end < row_end) {
      const RowRange unit = table_.codec().split_at(matrix, end);
      end = std::min(row_end, unit.begin > row_begin ? unit.begin : unit.end);
    }
    uint64_t pages = 0;
    for (const PageRun& run : pages_of(record, row_begin, end)) pages += run.end - run.begin;
    if (pages <= pages_max_ || end <= table_.codec().split_at(matrix, row_begin).end) return end;
    rows = std::max<uint64_t>(1, std::min(rows / 2, rows * pages_max_ / pages));
  }
}

double RowReader::decode(RecordIndex record, uint64_t row_begin, uint64_t row_end, uint16_t* out, RowDecoder& decoder) {
  const MatrixView matrix = view(record);
  double waited = 0;
  while (row_begin < row_end) {
    const uint64_t end = piece_end(record, row_begin, row_end);
    const Loan loan(*this, pages_of(record, row_begin, end));
    decoder.decode(matrix, row_begin, end, out);
    waited += loan.waited();
    out += (end - row_begin) * matrix.shape.columns;
    row_begin = end;
  }
  return waited;
}

double RowReader::gather(std::span<const RecordIndex> blocks, std::span<const int64_t> rows, uint16_t* out,
                         RowDecoder& decoder) {
  std::vector<MatrixView> views;
  for (const RecordIndex block : blocks) {
    if (!holds(block)) throw std::invalid_argument("blocks of one matrix are resident or on demand together");
    views.push_back(view(block));
  }
  const std::vector<uint32_t> order = ascending_order(rows);
  size_t block = 0;
  uint64_t block_begin = 0;  // number of the block's first row
  size_t begin = 0;          // first position in `order` of the batch
  uint64_t batch_pages = 0;
  std::vector<PageRun> batch;
  std::vector<PageRun> previous;  // of the row before
  double waited = 0;
  const auto finish_batch = [&](size_t end) {
    const Loan loan(*this, std::exchange(batch, {}));
    decoder.gather(views, rows, std::span(order).subspan(begin, end - begin), out);
    waited += loan.waited();
    begin = end;
    batch_pages = 0;
  };
  for (size_t i = 0; i < order.size(); ++i) {
    const auto row = static_cast<uint64_t>(rows[order[i]]);
    while (row >= block_begin + views[block].shape.rows) {
      block_begin += views[block++].shape.rows;
      previous.clear();
    }
    std::vector<PageRun> wanted = pages_of(blocks[block], row - block_begin, row - block_begin + 1);
    if (wanted == previous) continue;  // another row of the same unit
    uint64_t pages = added_pages(wanted, previous);
    if (!batch.empty() && batch_pages + pages > pages_max_) {
      finish_batch(i);
      pages = added_pages(wanted, {});
    }
    batch_pages += pages;
    batch.insert(batch.end(), wanted.begin(), wanted.end());
    previous = std::move(wanted);
  }
  finish_batch(order.size());
  return waited;
}

std::array<uint64_t, 2> RowReader::part_bytes() const {
  std::lock_guard lock(mutex_);
  return part_bytes_;
}

double RowReader::verify_seconds() const {
  std::lock_guard lock(mutex_);
  return verify_seconds_;
}

}  // namespace zipmoe
