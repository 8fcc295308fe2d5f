// The executor without Python. Runs under the address, undefined and thread sanitizers.
#include "runtime/engine.hpp"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "tests/packed_model.hpp"

using namespace std::chrono_literals;

namespace zipmoe {
namespace {

// Runs one request, checks every matrix it hands out, and returns the order.
std::vector<RecordIndex> run_request(Engine& engine, const PackedModel& model, const std::vector<RecordIndex>& records,
                                     HandOutOrder order = HandOutOrder::as_available) {
  std::vector<RecordIndex> handed_out;
  engine.begin_request(records, order);
  for (;;) {
    const RequestStep step = engine.next_expert(1000ms);
    if (step.kind == RequestStep::Kind::finished) break;
    if (step.kind == RequestStep::Kind::waiting) continue;
    const RecordIndex record = records[step.position];
    handed_out.push_back(record);
    for (uint32_t matrix = 0; matrix < 2; ++matrix) {
      const std::vector<uint16_t>& expected = model.weights(record, matrix);
      std::vector<uint16_t> decoded(expected.size());
      engine.decode(record, matrix, 0, kShapes[matrix].rows, decoded);
      CHECK(decoded == expected);
    }
  }
  engine.end_request();
  return handed_out;
}

void test_requests_hand_out_hits_first_and_each_expert_once() {
  for (const std::string& codec : codecs_to_test()) {
    const PackedModel model(codec, 10, codec == "fx3" ? 1 : 3);
    Engine engine(model.table(), model.options(4));
    load_dense(engine);
    CHECK(run_request(engine, model, {5, 2, 7}).size() == 3);
    const std::vector<RecordIndex> order = run_request(engine, model, {9, 7, 0, 5});
    CHECK(order.size() == 4);
    CHECK(order[0] == 7 && order[1] == 5);  // hits, in the order asked for
    CHECK(!engine.resident(2));             // the longest unused one made room
    for (const RecordIndex record : {0U, 5U, 7U, 9U}) CHECK(engine.resident(record));
    const EngineCounters counters = engine.counters();
    CHECK(counters.hits == 2 && counters.misses == 5 && counters.requests == 2 && counters.evictions == 1);
    CHECK(counters.read.reads == 7);  // two dense blocks
  }
}

void test_dense_records_are_used_during_a_request_and_an_abandoned_one_is_not_counted() {
  const PackedModel model("fx3", 10, 1);
  Engine engine(model.table(), model.options(3));
  load_dense(engine);
  const RecordIndex dense = 10;
  const auto check_dense = [&] {
    const std::vector<uint16_t>& expected = model.weights(dense, 0);
    std::vector<uint16_t> decoded(expected.size());
    engine.decode(dense, 0, 0, 100, decoded);
    CHECK(decoded == expected);
  };
  engine.abandon_request();  // there is none
  run_request(engine, model, {0, 1, 2});
  for (uint32_t handed_out = 0; handed_out < 3; ++handed_out) {
    engine.begin_request({1, 5, 6, 7}, HandOutOrder::as_available);
    check_dense();
    for (uint32_t i = 0; i < handed_out; ++i) engine.next_expert(1000ms);
    engine.abandon_request();
    check_dense();
    const EngineCounters counters = engine.counters();
    CHECK(counters.requests == 1 && counters.hits == 0 && counters.misses == 3);
  }
  CHECK(run_request(engine, model, {5, 6, 7, 8}).size() == 4);
  const EngineCounters counters = engine.counters();
  CHECK(counters.requests == 2 && counters.hits + counters.misses == 7);
}

void test_more_experts_than_slots_and_ascending_order() {
  for (const uint32_t slots : {1U, 2U, 3U, 5U}) {
    const PackedModel model("fx3", 12, 1);
    Engine engine(model.table(), model.options(slots));
    load_dense(engine);
    run_request(engine, model, {11, 10, 9});
    const uint64_t reads_before = engine.counters().read.reads;
    const std::vector<RecordIndex> wanted = {11, 3, 8, 0, 10, 5, 1, 9};
    std::vector<RecordIndex> order = run_request(engine, model, wanted, HandOutOrder::ascending);
    CHECK((order == std::vector<RecordIndex>{0, 1, 3, 5, 8, 9, 10, 11}));
    CHECK(engine.counters().read.reads - reads_before <= wanted.size());
    order = run_request(engine, model, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
    std::sort(order.begin(), order.end());
    CHECK((order == std::vector<RecordIndex>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
    CHECK(run_request(engine, model, {}).empty());
  }
}

void test_ascending_request_whose_hits_hold_every_slot() {
  const PackedModel model("fx3", 6, 1);
  Engine engine(model.table(), model.options(2));
  load_dense(engine);
  run_request(engine, model, {4, 5});
  CHECK(engine.resident(4) && engine.resident(5));
  CHECK((run_request(engine, model, {5, 4, 0, 1}, HandOutOrder::ascending) == std::vector<RecordIndex>{0, 1, 4, 5}));
}

// Three layers of 20 experts in 45 slots, all of them asked for pass after pass. Least recently used alone would throw
// out what the next layer needs: 5 hits in every layer.
void test_passes_over_all_experts_keep_those_of_later_layers() {
  const PackedModel model("fx3", 60, 1);
  EngineOptions options = model.options(45);
  options.eviction_policy = "lru";
  options.policy_parameters.requests_per_step = 3;
  Engine engine(model.table(), options);
  load_dense(engine);
  std::vector<uint64_t> hits;
  for (int pass = 0; pass < 2; ++pass) {
    for (RecordIndex first = 0; first < 60; first += 20) {
      std::vector<RecordIndex> layer(20);
      std::iota(layer.begin(), layer.end(), first);
      const uint64_t before = engine.counters().hits;
      CHECK(run_request(engine, model, layer).size() == 20);
      hits.push_back(engine.counters().hits - before);
    }
  }
  // Some of every layer stay: the disk has something to do all the time. How many depends a little on which reads are
  // done when the next ones ask for slots: 18, 15 or 16, and 9.
  CHECK(hits[0] + hits[1] + hits[2] == 0);
  CHECK(std::ranges::min(std::span(hits).subspan(3)) >= 7);
  CHECK(hits[3] + hits[4] + hits[5] >= 45 - kReadingThatEvictOthers);
  const std::vector<RecordIndex> ascending = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
  CHECK(run_request(engine, model, ascending, HandOutOrder::ascending) == ascending);
}

void test_memory_is_brought_in_in_the_background() {
  const PackedModel model("fx3", 10, 1);
  EngineOptions options = model.options(8);
  options.populate_threads = 2;
  for (int round = 0; round < 5; ++round) {
    Engine engine(model.table(), options);
    load_dense(engine);
    for (const uint32_t slots : {3U, 10U, 8U}) {  // while the threads are at it
      CHECK(run_request(engine, model, {9, 0, 3, 5, 1, 7, 2}).size() == 7);
      engine.resize_pool(0, slots);
    }
    engine.arena()->finish_populating();
    CHECK(run_request(engine, model, {4, 6, 8, 3, 0}).size() == 5);
  }
}

void test_decoding_is_the_same_on_any_number_of_threads() {
  for (const std::string& codec : codecs_to_test()) {
    const PackedModel model(codec, 3, codec == "fx3" ? 1 : 4);
    for (const uint32_t threads : {1U, 2U, 3U, 8U}) {
      Engine engine(model.table(), model.options(2, threads));
      load_dense(engine);
      run_request(engine, model, {0, 1, 2});
      std::vector<uint16_t> rows(7 * 32);
      const std::vector<int64_t> numbers = {199, 0, 3, 100, 99, 3, 150};
      const std::vector<RecordIndex> blocks = {3, 4};
      engine.gather(blocks, numbers, rows);
      for (size_t i = 0; i < numbers.size(); ++i) {
        const auto row = static_cast<size_t>(numbers[i]);
        const std::vector<uint16_t>& block = model.weights(row < 100 ? 3 : 4, 0);
        CHECK(std::equal(rows.begin() + static_cast<ptrdiff_t>(i * 32),
                         rows.begin() + static_cast<ptrdiff_t>(i * 32 + 32),
                         block.begin() + static_cast<ptrdiff_t>(row % 100 * 32)));
      }
      std::vector<uint16_t> middle(41 * 32);
      engine.decode(4, 0, 30, 71, middle);
      CHECK(std::equal(middle.begin(), middle.end(), model.weights(4, 0).begin() + 30 * 32));
      const std::vector<int64_t> outside = {200};
      EXPECT_ERROR(std::out_of_range, engine.gather(blocks, outside, rows));
    }
  }
}

void test_a_corrupt_record_is_named_and_the_rest_stays_usable() {
  for (const VerifyMode verify : {VerifyMode::always, VerifyMode::first}) {
    const PackedModel model("fx3", 8, 1);
    model.flip_byte(model.record(3).offset + 2000);
    EngineOptions options = model.options(3);
    options.verify = verify;
    Engine engine(model.table(), options);
    load_dense(engine);
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto error = EXPECT_ERROR(RecordError, run_request(engine, model, {1, 3, 5}));
      CHECK(error.record() == 3 && error.fault() == RecordFault::checksum_mismatch);
      engine.end_request();
      CHECK(!engine.resident(3));
    }
    CHECK(run_request(engine, model, {0, 1, 2, 4, 5, 6, 7}).size() == 7);
  }
}

void test_without_checksums_an_invalid_encoding_is_still_found() {
  const PackedModel model("fx3", 4, 1);
  model.flip_byte(model.record(2).offset + 4);  // the flags in the header
  EngineOptions options = model.options(2);
  options.verify = VerifyMode::never;
  Engine engine(model.table(), options);
  load_dense(engine);
  CHECK(run_request(engine, model, {0, 1, 3}).size() == 3);
  CHECK(EXPECT_ERROR(RecordError, run_request(engine, model, {2})).fault() == RecordFault::invalid_encoding);
}

void test_a_truncated_file_is_reported() {
  const PackedModel model("fx3", 4, 1);
  std::filesystem::resize_file(model.path(), model.record(3).offset + 100);
  Engine engine(model.table(), model.options(2));
  const auto error = EXPECT_ERROR(RecordError, load_dense(engine));
  CHECK(error.fault() == RecordFault::truncated && error.record() >= 4);
  CHECK(run_request(engine, model, {0, 1, 2}).size() == 3);
  CHECK(EXPECT_ERROR(RecordError, run_request(engine, model, {3})).fault() == RecordFault::truncated);
}

// Passes reads on, except that chosen records fail, and that completions can be held back.
class FaultyReader final : public Reader, public ReadSink {
 public:
  explicit FaultyReader(std::unique_ptr<Reader> inner) : inner_(std::move(inner)) {}
  void fail(uint64_t tag, int error_number) { failures_.emplace_back(tag, error_number); }
  void hold() {
    std::lock_guard lock(mutex_);
    holding_ = true;
  }
  void let_go() {
    std::vector<ReadCompletion> held;
    {
      std::lock_guard lock(mutex_);
      holding_ = false;
      held.swap(held_);
    }
    for (const ReadCompletion& completion : held) sink_->read_completed(completion);
  }

  void submit(const ReadJob& job) override {
    {
      std::lock_guard lock(mutex_);
      sink_ = job.sink;
    }
    ReadJob redirected = job;
    redirected.sink = this;
    inner_->submit(redirected);
  }
  void cancel() noexcept override { inner_->cancel(); }
  void read_completed(const ReadCompletion& completion) noexcept override {
    ReadCompletion changed = completion;
    ReadSink* sink = nullptr;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [tag, error_number] : failures_) {
        if (tag == completion.tag) changed.error_number = error_number;
      }
      if (holding_) {
        held_.push_back(changed);
        return;
      }
      sink = sink_;
    }
    sink->read_completed(changed);
  }
  ReadCounters counters() const override { return inner_->counters(); }
  std::string mode() const override { return "direct"; }
  std::string fallback_reason() const override { return {}; }

 private:
  std::mutex mutex_;
  ReadSink* sink_ = nullptr;
  bool holding_ = false;
  std::vector<ReadCompletion> held_;
  std::vector<std::pair<uint64_t, int>> failures_;
  std::unique_ptr<Reader> inner_;
};

std::unique_ptr<FaultyReader> faulty_reader(const PackedModel& model, const EngineOptions& options) {
  return std::make_unique<FaultyReader>(
      std::make_unique<ThreadPoolReader>(std::vector<std::string>{model.path()}, options.reader.threads));
}

void test_waiting_ends_in_time_and_resumes() {
  const PackedModel model("fx3", 8, 1);
  const EngineOptions options = model.options(3);
  auto owned = faulty_reader(model, options);
  FaultyReader& reader = *owned;
  Engine engine(model.table(), options, std::move(owned));
  load_dense(engine);
  run_request(engine, model, {4});
  reader.hold();
  engine.begin_request({1, 4}, HandOutOrder::as_available);
  CHECK(engine.next_expert(0ms).position == 1);  // the hit does not wait for the disk
  CHECK(engine.next_expert(0ms).kind == RequestStep::Kind::waiting);
  CHECK(engine.next_expert(20ms).kind == RequestStep::Kind::waiting);
  reader.let_go();
  CHECK(engine.next_expert(10000ms).position == 0);
  CHECK(engine.next_expert(0ms).kind == RequestStep::Kind::finished);
  engine.end_request();
  CHECK(engine.counters().wait_seconds >= 0.02);
  // Left while its reads are under way: the end waits for them, and nothing is lost or hangs.
  reader.hold();
  engine.begin_request({0, 2, 3, 5, 6}, HandOutOrder::ascending);
  std::thread disk([&] { reader.let_go(); });
  engine.end_request();
  disk.join();
  CHECK(run_request(engine, model, {0, 1, 2, 3, 4, 5, 6, 7}).size() == 8);
}

void test_an_io_error_is_reported_and_the_engine_stays_usable() {
  const PackedModel model("fx3", 8, 1);
  const EngineOptions options = model.options(3);
  auto reader = faulty_reader(model, options);
  reader->fail(6, EIO);
  Engine engine(model.table(), options, std::move(reader));
  load_dense(engine);
  for (const HandOutOrder order : {HandOutOrder::as_available, HandOutOrder::ascending}) {
    const auto error = EXPECT_ERROR(RecordError, run_request(engine, model, {5, 6, 7, 0, 1}, order));
    CHECK(error.record() == 6 && error.fault() == RecordFault::read_failed);
    engine.end_request();
    CHECK(run_request(engine, model, {0, 1, 2, 3, 4, 5, 7}, order).size() == 7);
  }
}

void test_requests_are_served_by_io_uring() {
  if (!uring_refusal().empty()) {
    std::printf("engine_test: io_uring left out: %s\n", uring_refusal().c_str());
    return;
  }
  const PackedModel model("fx3", 8, 1);
  EngineOptions options = model.options(3);
  options.reader.backend = IoBackend::uring;
  for (int round = 0; round < 10; ++round) {
    Engine engine(model.table(), options);
    CHECK(engine.io_backend() == IoBackend::uring && engine.uring_refusal().empty());
    load_dense(engine);
    CHECK(run_request(engine, model, {0, 1, 2, 3, 4, 5, 6, 7}).size() == 8);
    engine.begin_request({0, 1, 2}, HandOutOrder::as_available);  // ends with reads under way
  }
}

void test_misuse_is_refused() {
  const PackedModel model("fx3", 6, 1);
  Engine engine(model.table(), model.options(2));
  std::vector<uint16_t> out(24 * 64);
  EXPECT_ERROR(std::logic_error, engine.decode(6, 0, 0, 1, out));  // dense, not loaded
  load_dense(engine);
  EXPECT_ERROR(std::logic_error, engine.next_expert(0ms));
  EXPECT_ERROR(std::invalid_argument, engine.begin_request({1, 1}, HandOutOrder::as_available));
  EXPECT_ERROR(std::invalid_argument, engine.begin_request({6}, HandOutOrder::as_available));
  engine.begin_request({1, 2}, HandOutOrder::ascending);
  EXPECT_ERROR(std::logic_error, engine.begin_request({3}, HandOutOrder::as_available));
  EXPECT_ERROR(std::logic_error, engine.resize_pool(0, 3));
  EXPECT_ERROR(std::logic_error, engine.decode(1, 0, 0, 24, out));  // not handed out yet
  while (engine.next_expert(1000ms).kind == RequestStep::Kind::waiting) {
  }
  engine.decode(1, 0, 0, 24, out);
  EXPECT_ERROR(std::logic_error, engine.decode(2, 0, 0, 24, out));
  EXPECT_ERROR(std::out_of_range, engine.decode(1, 2, 0, 1, out));
  EXPECT_ERROR(std::out_of_range, engine.decode(1, 0, 0, 25, out));
  EXPECT_ERROR(std::invalid_argument, engine.decode(1, 0, 0, 24, std::span<uint16_t>(out).first(10)));
  engine.end_request();
  engine.end_request();
  engine.close();
  engine.close();
  EXPECT_ERROR(std::logic_error, engine.begin_request({1}, HandOutOrder::as_available));
  CHECK(engine.counters().misses == 2);
}

void test_record_table_refuses_contradictions() {
  const PackedModel model("fx3", 1, 1);
  const auto refused = [&](const std::function<void(Record&)>& spoil) {
    RecordTable table("fx3");
    table.add_file("packed");
    Record record = model.record(0);
    spoil(record);
    EXPECT_ERROR(std::invalid_argument, table.add_record(record));
  };
  refused([](Record& record) { record.file = 1; });
  refused([](Record& record) { record.offset += 1; });
  refused([](Record& record) { record.length = 0; });
  refused([](Record& record) { record.offset = UINT64_MAX - 4095; });
  refused([](Record& record) { record.extents[0].length = record.length + 1; });
  refused([](Record& record) { record.extents[0].offset = UINT64_MAX; });
  refused([](Record& record) { record.extents.push_back(record.extents[0]); });
  refused([](Record& record) { record.matrices.clear(); });
  refused([](Record& record) { record.matrices[0].shape.rows = 0; });
  refused([](Record& record) { record.matrices[0].sections[0].offset += 1; });
  refused([](Record& record) { record.matrices[0].sections[0].length = UINT64_MAX; });
  refused([](Record& record) { record.matrices[0].sections.clear(); });
  EXPECT_ERROR(UnknownCodec, RecordTable("rot13"));
}

void test_callers_in_several_threads_get_whole_results() {
  const PackedModel model("fx3", 16, 1);
  Engine engine(model.table(), model.options(3));
  load_dense(engine);
  std::mutex request_mutex;
  std::vector<std::thread> callers;
  for (uint32_t caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 generator(caller);
      for (int round = 0; round < 25; ++round) {
        std::set<RecordIndex> chosen;
        while (chosen.size() < 5) chosen.insert(static_cast<RecordIndex>(generator() % 16));
        const std::vector<RecordIndex> wanted(chosen.begin(), chosen.end());
        {
          std::lock_guard lock(request_mutex);
          const HandOutOrder order = generator() % 2 == 0 ? HandOutOrder::ascending : HandOutOrder::as_available;
          CHECK(run_request(engine, model, wanted, order).size() == 5);
          if (round % 5 == 0) engine.resize_pool(0, 1 + static_cast<uint32_t>(generator() % 8));
        }
        std::vector<uint16_t> dense(100 * 32);
        engine.decode(16, 0, 0, 100, dense);  // needs no request
        CHECK(dense == model.weights(16, 0));
        CHECK(engine.counters().requests > 0);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_requests_hand_out_hits_first_and_each_expert_once();
  zipmoe::test_dense_records_are_used_during_a_request_and_an_abandoned_one_is_not_counted();
  zipmoe::test_more_experts_than_slots_and_ascending_order();
  zipmoe::test_ascending_request_whose_hits_hold_every_slot();
  zipmoe::test_passes_over_all_experts_keep_those_of_later_layers();
  zipmoe::test_memory_is_brought_in_in_the_background();
  zipmoe::test_decoding_is_the_same_on_any_number_of_threads();
  zipmoe::test_a_corrupt_record_is_named_and_the_rest_stays_usable();
  zipmoe::test_without_checksums_an_invalid_encoding_is_still_found();
  zipmoe::test_a_truncated_file_is_reported();
  zipmoe::test_waiting_ends_in_time_and_resumes();
  zipmoe::test_an_io_error_is_reported_and_the_engine_stays_usable();
  zipmoe::test_requests_are_served_by_io_uring();
  zipmoe::test_misuse_is_refused();
  zipmoe::test_record_table_refuses_contradictions();
  zipmoe::test_callers_in_several_threads_get_whole_results();
  std::puts("engine_test: ok");
  return 0;
}
