// Predictions of the next request: read in idle disk time only, used when they come true, dropped when not. Runs under
// the address, undefined and thread sanitizers.
#include <algorithm>
#include <cerrno>
#include <random>
#include <set>
#include <utility>

#include "io/read_queue.hpp"
#include "tests/stepped_engine.hpp"

using namespace std::chrono_literals;

namespace zipmoe {
namespace {

constexpr uint64_t kMebibyte = uint64_t{1} << 20;

class NoSink final : public ReadSink {
 public:
  void read_completed(const ReadCompletion& /*completion*/) noexcept override {}
};

// Only the numbers count: nothing is read, and chunks are as long as may be.
struct QueueOfReads {
  QueueOfReads() : queue(1, 4 * kMebibyte, 16, 4 * kMebibyte) {}
  void push(uint64_t tag, uint64_t mebibytes, bool background) {
    ReadJob job{
        .file = 0, .offset = 0, .length = mebibytes * kMebibyte, .destination = &byte, .tag = tag, .sink = &sink};
    job.background = background;
    queue.push(job);
  }
  // Tag and MiB of the next chunk.
  std::pair<uint64_t, uint64_t> take() {
    taken.push_back(queue.try_take().value());
    return {taken.back().job().tag, taken.back().length() / kMebibyte};
  }
  std::optional<FinishedRead> finish(size_t index, int error_number = 0) {
    return queue.finish(taken.at(index),
                        {.bytes = error_number == 0 ? taken[index].length() : 0, .error_number = error_number},
                        std::chrono::steady_clock::now());
  }

  uint8_t byte = 0;
  NoSink sink;
  ReadQueue queue;
  std::vector<ReadChunk> taken;
};

using TagAndLength = std::pair<uint64_t, uint64_t>;

void test_background_reads_wait_until_no_other_is_outstanding() {
  QueueOfReads reads;
  reads.push(7, 3, true);
  reads.push(1, 5, false);
  CHECK((reads.take() == TagAndLength{1, 4}));
  CHECK((reads.take() == TagAndLength{1, 1}));
  CHECK(!reads.queue.try_take());  // 1 is still being read
  CHECK(!reads.finish(1));
  CHECK(!reads.queue.try_take());
  CHECK(reads.finish(0)->completion.tag == 1);
  CHECK((reads.take() == TagAndLength{7, 1}));  // in short chunks
  reads.push(2, 1, false);
  CHECK((reads.take() == TagAndLength{2, 1}));  // as soon as somebody comes, he is next
  CHECK(!reads.queue.try_take());
  CHECK(reads.finish(3));
  CHECK((reads.take() == TagAndLength{7, 1}));
  CHECK((reads.take() == TagAndLength{7, 1}));
  CHECK(!reads.finish(2) && !reads.finish(5));
  const auto finished = reads.finish(4);
  CHECK(finished->completion.tag == 7 && finished->completion.bytes == 3 * kMebibyte);
}

void test_a_promoted_read_is_an_ordinary_one() {
  QueueOfReads reads;
  reads.push(7, 9, true);
  reads.push(8, 9, true);
  CHECK((reads.take() == TagAndLength{7, 1}));
  reads.push(1, 4, false);
  CHECK(reads.queue.promote(7));   // had begun
  CHECK(!reads.queue.promote(8));  // had not
  CHECK(reads.queue.promote(9));   // there is none any more
  reads.push(2, 4, false);
  CHECK((reads.take() == TagAndLength{1, 4}));
  CHECK((reads.take() == TagAndLength{7, 4}));
  CHECK((reads.take() == TagAndLength{7, 4}));
  CHECK((reads.take() == TagAndLength{8, 4}));
  reads.queue.cancel_background();  // there are none
  CHECK((reads.take() == TagAndLength{8, 4}));
}

void test_cancelled_background_reads_end_at_once() {
  QueueOfReads reads;
  reads.push(7, 9, true);
  reads.push(8, 9, true);
  CHECK((reads.take() == TagAndLength{7, 1}));
  reads.push(1, 4, false);
  CHECK((reads.take() == TagAndLength{1, 4}));
  reads.queue.cancel();  // concerns the others
  reads.queue.cancel_background();
  for (int i = 0; i < 2; ++i) {
    reads.take();
    CHECK(reads.taken.back().skip());
    const auto finished = reads.finish(reads.taken.size() - 1, ECANCELED);
    CHECK(finished.has_value() == (reads.taken.back().job().tag == 8));
  }
  CHECK(!reads.queue.try_take());
  const auto finished = reads.finish(0);  // its one chunk was under way
  CHECK(finished->completion.tag == 7 && finished->completion.error_number == ECANCELED);
  CHECK(finished->completion.bytes == kMebibyte);
  reads.push(9, 1, true);
  reads.queue.stop();
  CHECK(reads.queue.take()->skip());
  CHECK(!reads.queue.take());
}

void test_only_what_was_carried_out_counts_as_a_read() {
  QueueOfReads reads;
  reads.push(7, 2, true);
  reads.push(8, 2, true);
  reads.push(1, 1, false);
  reads.queue.cancel();
  reads.queue.cancel_background();
  for (size_t i = 0; i < 3; ++i) {
    reads.take();
    CHECK(reads.taken[i].skip() && reads.finish(i, ECANCELED));
  }
  ReadCounters counted = reads.queue.counters();
  CHECK(counted.reads == 0 && counted.bytes == 0 && counted.latency_seconds == 0 && counted.longest_seconds == 0);
  reads.push(9, 2, true);
  reads.take();
  reads.queue.cancel_background();  // it has begun
  reads.take();
  CHECK(reads.taken[4].skip() && !reads.finish(4, ECANCELED) && reads.finish(3));
  counted = reads.queue.counters();
  CHECK(counted.reads == 1 && counted.bytes == kMebibyte);
  reads.push(2, 1, false);
  reads.take();
  CHECK(reads.finish(5, EIO));  // failed, and was carried out
  CHECK(reads.queue.counters().reads == 2);
}

// As long as others are read, it waits: that is not the disk's time.
void test_a_background_read_takes_time_from_its_beginning_on() {
  using Clock = std::chrono::steady_clock;
  for (const bool promoted : {false, true}) {
    QueueOfReads reads;
    reads.push(7, 1, true);
    for (size_t i = 0; i < 8; ++i) {
      reads.push(i, 1, false);
      reads.take();
      CHECK(reads.finish(i));
    }
    const double before = reads.queue.counters().latency_seconds;
    const Clock::time_point begin = Clock::now();
    if (promoted) CHECK(!reads.queue.promote(7));
    reads.take();
    CHECK(reads.finish(8));
    const double longest = std::chrono::duration<double>(Clock::now() - begin).count();
    const double found = reads.queue.counters().latency_seconds - before;
    CHECK(reads.queue.counters().reads == 9 && found <= longest);
  }
}

void test_predictions_wait_for_the_request_and_become_the_next_ones() {
  Stepped run(5, 2);
  run.engine->begin_request({0, 1, 2}, HandOutOrder::as_available);
  run.engine->predict({0, 5, 6, 7});  // of the open request's own, and of more than have slots, nothing is read
  CHECK(run.engine->counters().look_ahead.predicted == 2);
  run.finish_request({0, 1, 2});
  const std::vector<uint64_t>& log = run.reader->log;
  const auto first_predicted = std::ranges::find_if(log, [](uint64_t tag) { return tag >= 5; });
  CHECK(std::ranges::count_if(log.begin(), first_predicted, [](uint64_t tag) { return tag < 3; }) ==
        first_predicted - log.begin());
  CHECK(std::all_of(first_predicted, log.end(), [](uint64_t tag) { return tag == 5 || tag == 6; }));
  CHECK(run.resident() == 3);  // nobody was evicted, and predictions are not residents
  const size_t reads_before = log.size();
  run.engine->begin_request({8, 5}, HandOutOrder::as_available);
  CHECK(run.engine->next_expert(0ms).position == 1);  // nothing is waited for
  run.check(5);
  run.reader->run();
  CHECK(std::all_of(log.begin() + static_cast<ptrdiff_t>(reads_before), log.end(),
                    [](uint64_t tag) { return tag == 8; }));
  CHECK(run.engine->next_expert(0ms).position == 0);
  run.engine->end_request();
  const EngineCounters counters = run.engine->counters();
  CHECK(counters.hits == 0 && counters.misses == 4 && counters.prefetched == 1);
  CHECK(counters.look_ahead.used_bytes == run.model.record(5).length);
  CHECK(counters.look_ahead.wasted == 1 && counters.look_ahead.wasted_bytes == run.model.record(6).length);
  CHECK(run.engine->resident(5) && run.engine->resident(8) && !run.engine->resident(6));
}

void test_a_prediction_under_way_is_read_to_the_end_and_others_are_not_begun() {
  for (const HandOutOrder order : {HandOutOrder::as_available, HandOutOrder::ascending}) {
    Stepped run(6, 3);
    run.engine->predict({5, 6, 7});  // of the request after the next one
    CHECK(run.engine->counters().look_ahead.predicted == 0);
    run.engine->begin_request({0}, order);
    CHECK(run.engine->counters().look_ahead.predicted == 3);
    const auto chunks = static_cast<size_t>(run.model.record(0).length / 4096);
    CHECK(chunks > 1);
    for (size_t i = 0; i < chunks + 1; ++i) CHECK(run.reader->step());
    CHECK(run.reader->log.back() == 5);
    CHECK(run.engine->next_expert(0ms).position == 0);
    run.engine->end_request();
    run.engine->begin_request({5, 7, 8}, order);
    CHECK(run.engine->next_expert(0ms).kind == RequestStep::Kind::waiting);
    run.finish_request({5, 7, 8});
    CHECK(std::ranges::count(run.reader->log, uint64_t{6}) == 0);
    CHECK(std::ranges::count(run.reader->log, uint64_t{5}) == static_cast<ptrdiff_t>(chunks));
    const EngineCounters counters = run.engine->counters();
    CHECK(counters.prefetched == 1 && counters.misses == 3);  // nothing of 7 had been read
    CHECK(counters.look_ahead.used_bytes == run.model.record(5).length && counters.look_ahead.wasted == 0);
  }
}

void test_spared_slots_are_few_and_lent_out() {
  Stepped run(5, 2);
  run.engine->begin_request({0, 1, 2, 3}, HandOutOrder::as_available);
  run.finish_request({0, 1, 2, 3});
  run.engine->begin_request({4}, HandOutOrder::as_available);
  run.finish_request({4});
  CHECK(run.resident() <= 3);
  for (int round = 0; round < 4; ++round) {  // what was used takes its slot with it, and the pool gives another one
    const auto next = static_cast<RecordIndex>(6 + round);
    run.engine->begin_request({static_cast<RecordIndex>(round == 0 ? 4 : next - 1)}, HandOutOrder::as_available);
    run.engine->predict({next});
    run.finish_request({static_cast<RecordIndex>(round == 0 ? 4 : next - 1)});
    CHECK(run.resident() <= 4);
  }
  CHECK(run.engine->counters().prefetched == 3);
  run.engine->begin_request({9, 10, 11, 0, 1, 2}, HandOutOrder::ascending);  // all slots at once
  run.engine->abandon_request();
  Stepped narrow(2, 2);  // the least that a pool has is not lent
  narrow.engine->begin_request({0}, HandOutOrder::as_available);
  narrow.engine->predict({5});
  CHECK(narrow.engine->counters().look_ahead.predicted == 0);
  narrow.finish_request({0});
}

void test_damage_is_reported_to_who_asks_for_it() {
  Stepped run(5, 2);
  run.model.flip_byte(run.model.record(5).offset + 70);
  run.engine->begin_request({0}, HandOutOrder::as_available);
  run.engine->predict({5});
  run.finish_request({0});
  run.engine->begin_request({1}, HandOutOrder::as_available);
  run.engine->predict({5});
  run.finish_request({1});
  run.engine->begin_request({5, 2}, HandOutOrder::ascending);
  run.reader->run();
  const auto error = EXPECT_ERROR(RecordError, run.engine->next_expert(0ms));
  CHECK(error.record() == 5 && error.fault() == RecordFault::checksum_mismatch);
  run.engine->end_request();
  CHECK(run.engine->counters().prefetched == 0);
  run.engine->begin_request({3}, HandOutOrder::as_available);
  run.finish_request({3});
}

void test_pools_change_their_size_between_predictions() {
  Stepped run(8, 3);
  run.engine->begin_request({0, 1, 2}, HandOutOrder::as_available);
  run.engine->predict({5, 6, 7});
  run.finish_request({0, 1, 2});
  run.engine->resize_pool(0, 3);
  CHECK(run.engine->counters().look_ahead.wasted == 3);
  run.engine->begin_request({5, 0}, HandOutOrder::as_available);
  run.finish_request({5, 0});
  run.engine->resize_pool(0, 12);
  run.engine->begin_request({0}, HandOutOrder::as_available);
  run.engine->predict({8, 9});
  run.engine->abandon_request();
  run.engine->begin_request({8, 9}, HandOutOrder::as_available);
  run.finish_request({8, 9});
  run.engine->begin_request({1}, HandOutOrder::as_available);
  run.engine->predict({10, 11});
  run.finish_request({1});
  run.engine->close();  // with predictions in their slots
}

void test_misuse_is_refused() {
  const PackedModel model("fx3", 4, 1);
  Engine pooled(model.table(), model.pool_options({.experts = {0, 2, 0, 0}}, 2));
  EXPECT_ERROR(std::logic_error, pooled.enable_look_ahead(2));
  pooled.predict({1});  // nobody listens
  Engine engine(model.table(), model.options(4));
  load_dense(engine);
  engine.predict({1});
  engine.enable_look_ahead(2);
  EXPECT_ERROR(std::invalid_argument, engine.predict({4}));
  EXPECT_ERROR(std::invalid_argument, engine.predict({99}));
  engine.close();
  EXPECT_ERROR(std::logic_error, engine.predict({1}));
}

// Real threads: whatever is predicted, requests get the weights that they ask for.
void test_random_predictions(IoBackend backend) {
  const PackedModel model("fx3", 16, 1);
  for (const uint32_t slots : {3U, 5U, 9U}) {
    EngineOptions options = model.options(slots);
    options.reader.backend = backend;
    Engine engine(model.table(), options);
    load_dense(engine);
    engine.enable_look_ahead(3);
    std::mt19937 generator(slots);
    std::vector<RecordIndex> next;
    uint64_t requested = 0;
    for (int round = 0; round < 150; ++round) {
      std::set<RecordIndex> chosen(next.begin(), next.end());
      while (chosen.size() < 4) chosen.insert(static_cast<RecordIndex>(generator() % 16));
      if (generator() % 3 == 0) chosen.erase(chosen.begin());
      const std::vector<RecordIndex> records(chosen.begin(), chosen.end());
      const bool ascending = generator() % 2 == 0;
      engine.begin_request(records, ascending ? HandOutOrder::ascending : HandOutOrder::as_available);
      next = {static_cast<RecordIndex>(generator() % 16), static_cast<RecordIndex>(generator() % 16)};
      engine.predict(next);
      if (generator() % 8 == 0) {
        engine.abandon_request();
        continue;
      }
      requested += records.size();
      size_t handed_out = 0;
      for (;;) {
        const RequestStep step = engine.next_expert(1000ms);
        if (step.kind == RequestStep::Kind::finished) break;
        if (step.kind == RequestStep::Kind::waiting) continue;
        const std::vector<uint16_t>& expected = model.weights(records[step.position], 0);
        std::vector<uint16_t> decoded(expected.size());
        engine.decode(records[step.position], 0, 0, kShapes[0].rows, decoded);
        CHECK(decoded == expected);
        ++handed_out;
      }
      CHECK(handed_out == records.size());
      engine.end_request();
      if (round % 40 == 39) engine.resize_pool(0, slots + static_cast<uint32_t>(generator() % 4));
    }
    const EngineCounters counters = engine.counters();
    CHECK(counters.hits + counters.misses + counters.prefetched == requested);
    CHECK(counters.look_ahead.predicted >= counters.prefetched + counters.look_ahead.wasted);
    CHECK(counters.look_ahead.predicted > 0);
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_background_reads_wait_until_no_other_is_outstanding();
  zipmoe::test_a_promoted_read_is_an_ordinary_one();
  zipmoe::test_cancelled_background_reads_end_at_once();
  zipmoe::test_only_what_was_carried_out_counts_as_a_read();
  zipmoe::test_a_background_read_takes_time_from_its_beginning_on();
  zipmoe::test_predictions_wait_for_the_request_and_become_the_next_ones();
  zipmoe::test_a_prediction_under_way_is_read_to_the_end_and_others_are_not_begun();
  zipmoe::test_spared_slots_are_few_and_lent_out();
  zipmoe::test_damage_is_reported_to_who_asks_for_it();
  zipmoe::test_pools_change_their_size_between_predictions();
  zipmoe::test_misuse_is_refused();
  zipmoe::test_random_predictions(zipmoe::IoBackend::threads);
  if (zipmoe::uring_refusal().empty()) zipmoe::test_random_predictions(zipmoe::IoBackend::uring);
  std::puts("look_ahead_test: ok");
  return 0;
}
