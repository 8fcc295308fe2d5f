// Dense matrices whose rows are read when they are looked up. Runs under the address, undefined and thread sanitizers.
#include "runtime/row_reader.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <thread>

#include "tests/packed_model.hpp"

namespace zipmoe {
namespace {

constexpr MatrixShape kBlock{1000, 320};
const std::vector<RecordIndex> kBlocks = {2, 3};

PackedModel model_of(const std::string& codec) { return PackedModel(codec, 2, codec == "fx3" ? 1 : 7, kBlock); }

EngineOptions options_of(const PackedModel& model, VerifyMode verify = VerifyMode::always) {
  EngineOptions options = model.options(1);
  options.rows_on_demand = kBlocks;
  options.verify = verify;
  return options;
}

void check_rows(Engine& engine, const PackedModel& model, const std::vector<int64_t>& rows) {
  std::vector<uint16_t> found(rows.size() * kBlock.columns);
  engine.gather(kBlocks, rows, found);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<uint64_t>(rows[i]);
    const std::vector<uint16_t>& block = model.weights(row < kBlock.rows ? 2 : 3, 0);
    CHECK(std::equal(found.begin() + static_cast<ptrdiff_t>(i * kBlock.columns),
                     found.begin() + static_cast<ptrdiff_t>((i + 1) * kBlock.columns),
                     block.begin() + static_cast<ptrdiff_t>(row % kBlock.rows * kBlock.columns)));
  }
}

void test_rows_in_any_order_and_whole_blocks() {
  for (const std::string& codec : codecs_to_test()) {
    for (const auto& [verify, keep_details] : {std::pair{VerifyMode::always, false},
                                               {VerifyMode::always, true},
                                               {VerifyMode::first, true},
                                               {VerifyMode::never, false}}) {
      const PackedModel model = model_of(codec);
      EngineOptions options = options_of(model, verify);
      options.keep_row_details = keep_details;
      Engine engine(model.table(), options);
      load_dense(engine);
      check_rows(engine, model, {0});
      check_rows(engine, model, {1999, 0, 1000, 999, 7, 7, 1999, 4, 5, 6});
      check_rows(engine, model, {});
      std::mt19937 generator(3);
      std::vector<int64_t> rows(700);
      for (int64_t& row : rows) row = static_cast<int64_t>(generator() % 2000);
      check_rows(engine, model, rows);
      std::vector<uint16_t> block(kBlock.rows * kBlock.columns);
      engine.decode(3, 0, 0, kBlock.rows, block);
      CHECK(block == model.weights(3, 0));
      engine.decode(2, 0, 501, 503, block);
      CHECK(std::equal(block.begin(), block.begin() + 2 * 320, model.weights(2, 0).begin() + 501 * 320));
      engine.decode(2, 0, 10, 10, {});
      CHECK(!engine.resident(2));
      const EngineCounters counters = engine.counters();
      CHECK(counters.part_read_bytes[0] + counters.part_read_bytes[1] == counters.read.bytes);
      CHECK(counters.wait_seconds > 0 && counters.decoded_bytes > 0);
    }
  }
}

// One look-up reads the pages of the row, far less than the block.
void test_a_row_reads_little() {
  const PackedModel model = model_of("fx3");
  Engine engine(model.table(), options_of(model));
  load_dense(engine);
  const uint64_t before = engine.counters().read.bytes;
  check_rows(engine, model, {500, 501});  // one group
  const uint64_t read = engine.counters().read.bytes - before;
  CHECK(read > 0 && read <= 4 * kPageBytes);
  CHECK(model.record(2).length > 100 * kPageBytes);
}

// Pages of the region that are in memory, by record.
uint64_t pages_in_memory(const RowReader& rows, const PackedModel& model, RecordIndex record) {
  std::vector<unsigned char> present(model.record(record).length / kPageBytes);
  CHECK(::mincore(rows.destination(record), model.record(record).length, present.data()) == 0);
  return static_cast<uint64_t>(std::count_if(present.begin(), present.end(), [](unsigned char p) { return p & 1; }));
}

// A reader that answers on the caller's thread and remembers how much was in memory at once.
class DirectReader final : public Reader {
 public:
  explicit DirectReader(const PackedModel& model) : file_(model.path(), IoMode::buffered) {}
  void submit(const ReadJob& job) override {
    const ReadOutcome outcome = file_.read(job.offset, job.length, job.destination);
    bytes += job.length;
    ++reads;
    const bool fails = fail_with != 0;
    job.sink->read_completed(
        {job.tag, fails ? 0 : outcome.bytes - cut_bytes, fails ? fail_with : outcome.error_number});
  }
  void cancel() noexcept override {}
  ReadCounters counters() const override { return {}; }
  std::string mode() const override { return "buffered"; }
  std::string fallback_reason() const override { return "test"; }

  uint64_t bytes = 0;
  uint64_t reads = 0;
  uint64_t cut_bytes = 0;
  int fail_with = 0;

 private:
  SourceFile file_;
};

struct OpenRows {
  explicit OpenRows(const std::string& codec, bool keep_details = false)
      : model(model_of(codec)),
        table(model.table()),
        reader(model),
        rows(table, kBlocks, keep_details, VerifyMode::always, reader) {
    for (const RecordIndex record : kBlocks) {
      const SourceFile file(model.path(), IoMode::buffered);
      file.read(table[record].offset, table[record].length, rows.destination(record));
      rows.settle(record);
    }
  }
  double gather(const std::vector<int64_t>& numbers, std::vector<uint16_t>& out) {
    out.resize(numbers.size() * kBlock.columns);
    return rows.gather(kBlocks, numbers, out.data(), decoder);
  }

  PackedModel model;
  RecordTable table;
  DirectReader reader;
  RowReader rows;
  RowDecoder decoder{table.codec(), InstructionSet::scalar, 2};
};

void test_only_the_index_stays_in_memory() {
  for (const std::string& codec : codecs_to_test()) {
    OpenRows open(codec);
    // FX3: 64 bytes of header and the index of 250 groups; planar codecs need none.
    const uint64_t index_pages = codec == "fx3" ? 1 : 0;
    for (const RecordIndex record : kBlocks) CHECK(pages_in_memory(open.rows, open.model, record) == index_pages);
    std::vector<uint16_t> out;
    std::vector<int64_t> all(2 * kBlock.rows);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    open.gather(all, out);
    for (const RecordIndex record : kBlocks) CHECK(pages_in_memory(open.rows, open.model, record) == index_pages);
    const uint64_t length = open.table[2].length + open.table[3].length;
    const uint64_t kept = 2 * index_pages * kPageBytes + length / kPageBytes * 16;
    // The transient pages: at most the longest record.
    CHECK(RowReader::reserved_bytes(open.table, kBlocks) ==
          kept + std::max(open.table[2].length, open.table[3].length));
  }
}

// With the exceptions in memory a row is one read of the pages of its group, and nothing of theirs is given back.
void test_details_stay_in_memory() {
  OpenRows open("fx3", true);
  const uint64_t group_bytes = 5 * 4 * 88;  // 320 columns are 5 blocks, of 4 rows
  uint64_t kept = 0;
  for (const RecordIndex record : kBlocks) {
    const uint64_t pages = pages_in_memory(open.rows, open.model, record);
    CHECK(pages > 1 && pages <= 1 + open.table[record].length / kPageBytes / 8);
    kept += pages;
  }
  CHECK(RowReader::details_bytes(open.table, kBlocks) == (kept - kBlocks.size()) * kPageBytes);
  std::vector<uint16_t> out;
  for (const int64_t row : {int64_t{0}, int64_t{999}, int64_t{1000}, int64_t{1507}, int64_t{1999}}) {
    open.reader.reads = open.reader.bytes = 0;
    open.gather({row}, out);
    const std::vector<uint16_t>& block = open.model.weights(row < 1000 ? 2 : 3, 0);
    CHECK(std::equal(out.begin(), out.end(), block.begin() + row % 1000 * 320));
    CHECK(open.reader.reads <= 1 && open.reader.bytes <= round_up(group_bytes, kPageBytes) + kPageBytes);
  }
  std::vector<int64_t> all(2 * kBlock.rows);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  open.reader.bytes = 0;
  open.gather(all, out);
  uint64_t absent = 0;
  for (const RecordIndex record : kBlocks) absent += open.table[record].length / kPageBytes;
  CHECK(open.reader.bytes <= (absent - kept + 4) * kPageBytes);  // two batches may share pages
  uint64_t still = 0;
  for (const RecordIndex record : kBlocks) still += pages_in_memory(open.rows, open.model, record);
  CHECK(still == kept);
}

// Planar codecs have none, and what is a large part of a record is not kept.
void test_details_that_are_not_worth_keeping() {
  for (const std::string& codec : codecs_to_test()) {
    if (codec != "fx3") CHECK(RowReader::details_bytes(model_of(codec).table(), kBlocks) == 0);
  }
  const PackedModel tiny("fx3", 1, 1, {64, 64});  // a page of exceptions is a large part of it
  const RecordTable table = tiny.table();
  const std::vector<RecordIndex> block = {1};
  CHECK(table[1].length < 8 * kPageBytes);
  CHECK(RowReader::details_bytes(table, block) == 0);
}

// More rows than fit at once are read in several goes, each page once where the rows are in order.
void test_many_rows_are_read_in_batches() {
  constexpr MatrixShape tall{5000, 1280};
  const PackedModel model("fx3", 1, 1, tall);
  const RecordTable table = model.table();
  const std::vector<RecordIndex> blocks = {1, 2};
  DirectReader reader(model);
  RowReader rows(table, blocks, false, VerifyMode::always, reader);
  for (const RecordIndex record : blocks) {
    const SourceFile file(model.path(), IoMode::buffered);
    file.read(table[record].offset, table[record].length, rows.destination(record));
    rows.settle(record);
  }
  CHECK(table[1].length > uint64_t{8} << 20);
  const uint64_t transient = uint64_t{8} << 20;
  CHECK(RowReader::reserved_bytes(table, blocks) < transient + (uint64_t{1} << 20));
  RowDecoder decoder(table.codec(), InstructionSet::scalar, 2);
  std::vector<int64_t> numbers;
  for (int64_t row = 0; row < 10000; row += 3) numbers.push_back(row);
  std::vector<uint16_t> out(numbers.size() * tall.columns);
  rows.gather(blocks, numbers, out.data(), decoder);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto row = static_cast<uint64_t>(numbers[i]);
    const std::vector<uint16_t>& block = model.weights(row < 5000 ? 1 : 2, 0);
    CHECK(std::equal(out.begin() + static_cast<ptrdiff_t>(i * tall.columns),
                     out.begin() + static_cast<ptrdiff_t>((i + 1) * tall.columns),
                     block.begin() + static_cast<ptrdiff_t>(row % 5000 * tall.columns)));
  }
  CHECK(reader.bytes < table[1].length + table[2].length + 64 * kPageBytes);
  std::vector<uint16_t> block(tall.rows * tall.columns);
  rows.decode(2, 0, tall.rows, block.data(), decoder);
  CHECK(block == model.weights(2, 0));
}

void test_damage_after_loading_is_found(bool keep_details) {
  for (const std::string& codec : codecs_to_test()) {
    OpenRows open(codec, keep_details);
    std::vector<uint64_t> kept;
    for (const RecordIndex each : kBlocks) kept.push_back(pages_in_memory(open.rows, open.model, each));
    const Record& record = open.table[3];
    std::vector<uint16_t> out;
    open.gather({1500}, out);
    const std::vector<uint16_t> before = out;
    const uint64_t middle = open.table[3].matrices[0].sections.back().offset + record.length / 4;
    open.model.flip_byte(record.offset + middle);
    std::vector<int64_t> all(kBlock.rows);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(kBlock.rows + i);
    const RecordError error = EXPECT_ERROR(RecordError, open.gather(all, out));
    CHECK(error.fault() == RecordFault::checksum_mismatch && error.record() == 3);
    CHECK(std::string(error.what()).find("checksum") != std::string::npos);
    std::vector<uint16_t> block(kBlock.rows * kBlock.columns);
    EXPECT_ERROR(RecordError, open.rows.decode(3, 0, kBlock.rows, block.data(), open.decoder));
    open.rows.decode(2, 0, kBlock.rows, block.data(), open.decoder);  // the other block is as it was
    CHECK(block == open.model.weights(2, 0));
    open.model.flip_byte(record.offset + middle);
    open.gather({1500}, out);
    CHECK(out == before);
    for (size_t i = 0; i < kept.size(); ++i) CHECK(pages_in_memory(open.rows, open.model, kBlocks[i]) == kept[i]);
  }
}

void test_failing_reads_are_named_and_leave_nothing_behind() {
  OpenRows open("fx3");
  std::vector<uint16_t> out;
  open.reader.fail_with = EIO;
  const RecordError failed = EXPECT_ERROR(RecordError, open.gather({5}, out));
  CHECK(failed.fault() == RecordFault::read_failed && failed.record() == 2);
  open.reader.fail_with = 0;
  open.reader.cut_bytes = 100;
  const RecordError cut = EXPECT_ERROR(RecordError, open.gather({5}, out));
  CHECK(cut.fault() == RecordFault::truncated && cut.record() == 2);
  open.reader.cut_bytes = 0;
  open.gather({5}, out);
  CHECK(std::equal(out.begin(), out.end(), open.model.weights(2, 0).begin() + 5 * 320));
  CHECK(pages_in_memory(open.rows, open.model, 2) == 1);
}

void test_damage_before_loading_is_found_at_the_start() {
  for (const VerifyMode verify : {VerifyMode::always, VerifyMode::first}) {
    const PackedModel model = model_of("fx3");
    model.flip_byte(model.record(3).offset + model.record(3).length / 2);
    Engine engine(model.table(), options_of(model, verify));
    const RecordError error = EXPECT_ERROR(RecordError, load_dense(engine));
    CHECK(error.fault() == RecordFault::checksum_mismatch && error.record() == 3);
  }
}

void test_a_truncated_file_after_loading() {
  const PackedModel model = model_of("fx3");
  Engine engine(model.table(), options_of(model));
  load_dense(engine);
  std::filesystem::resize_file(model.path(), model.record(3).offset + kPageBytes);
  std::vector<uint16_t> row(kBlock.columns);
  const std::vector<int64_t> last = {1999};
  const RecordError error = EXPECT_ERROR(RecordError, engine.gather(kBlocks, last, row));
  CHECK(error.fault() == RecordFault::truncated && error.record() == 3);
  check_rows(engine, model, {0, 999});
}

void test_misuse_is_refused() {
  const PackedModel model = model_of("fx3");
  EngineOptions options = options_of(model);
  options.rows_on_demand = {0};
  EXPECT_ERROR(std::invalid_argument, Engine(model.table(), options));  // an expert
  options.rows_on_demand = {2, 2};
  EXPECT_ERROR(std::invalid_argument, Engine(model.table(), options));
  options.rows_on_demand = {3};
  Engine engine(model.table(), options);
  std::vector<uint16_t> row(kBlock.columns);
  const std::vector<int64_t> first = {0};
  EXPECT_ERROR(std::logic_error, engine.gather(kBlocks, first, row));  // not loaded
  load_dense(engine);
  EXPECT_ERROR(std::invalid_argument, engine.gather(kBlocks, first, row));  // only one of its blocks is on demand
  CHECK(engine.resident(2) && !engine.resident(3));
  engine.close();
  EXPECT_ERROR(std::logic_error, engine.gather(kBlocks, first, row));
}

void test_rows_during_a_request_and_from_several_threads() {
  const PackedModel model = model_of("fx3");
  Engine engine(model.table(), options_of(model));
  load_dense(engine);
  engine.begin_request({0, 1}, HandOutOrder::as_available);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int64_t i = 0; i < 20; ++i) check_rows(engine, model, {i * 90 + caller, 1999 - i});
    });
  }
  for (std::thread& caller : callers) caller.join();
  engine.end_request();
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_rows_in_any_order_and_whole_blocks();
  zipmoe::test_a_row_reads_little();
  zipmoe::test_only_the_index_stays_in_memory();
  zipmoe::test_details_stay_in_memory();
  zipmoe::test_details_that_are_not_worth_keeping();
  zipmoe::test_many_rows_are_read_in_batches();
  for (const bool keep_details : {false, true}) zipmoe::test_damage_after_loading_is_found(keep_details);
  zipmoe::test_failing_reads_are_named_and_leave_nothing_behind();
  zipmoe::test_damage_before_loading_is_found_at_the_start();
  zipmoe::test_a_truncated_file_after_loading();
  zipmoe::test_misuse_is_refused();
  zipmoe::test_rows_during_a_request_and_from_several_threads();
  std::puts("row_reader_test: ok");
  return 0;
}
