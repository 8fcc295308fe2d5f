// Look-ahead in passes that ask every layer for most of its experts: the disk goes on with the next layer while the
// present one is computed, at the cost of nobody whom the pass will ask for. Runs under the sanitizers.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "tests/stepped_engine.hpp"

using namespace std::chrono_literals;

namespace zipmoe {
namespace {

constexpr uint32_t kLayers = 3;
constexpr uint32_t kLayerExperts = 16;
constexpr uint32_t kSpared = 2;

std::vector<RecordIndex> layer(uint32_t number) {
  std::vector<RecordIndex> records(kLayerExperts);
  std::iota(records.begin(), records.end(), number * kLayerExperts);
  return records;
}

uint32_t layer_of(uint64_t tag) { return static_cast<uint32_t>(tag) / kLayerExperts; }

Stepped sweeping(uint32_t slots) { return Stepped(slots, kSpared, kLayers * kLayerExperts, kLayers); }

uint64_t predicted(const Stepped& run) { return run.engine->counters().look_ahead.predicted; }

// Hands everybody out, with one chunk read whenever the request would wait.
void compute(Stepped& run, const std::vector<RecordIndex>& records) {
  std::set<RecordIndex> handed_out;
  for (;;) {
    const RequestStep step = run.next();
    if (step.kind == RequestStep::Kind::finished) break;
    if (step.kind == RequestStep::Kind::waiting) {
      CHECK(run.reader->step());  // whoever waits has reads
      continue;
    }
    run.check(records[step.position]);
    handed_out.insert(records[step.position]);
  }
  CHECK(handed_out == std::set<RecordIndex>(records.begin(), records.end()));
}

void serve(Stepped& run, const std::vector<RecordIndex>& records, const std::vector<RecordIndex>& next,
           HandOutOrder order = HandOutOrder::as_available) {
  run.engine->begin_request(records, order);
  if (!next.empty()) run.engine->predict(next);
  compute(run, records);
  run.engine->end_request();
}

void test_the_next_layer_is_read_before_it_asks() {
  Stepped run = sweeping(kLayerExperts + kSpared);
  run.engine->begin_request(layer(0), HandOutOrder::as_available);
  run.engine->predict(layer(1));
  CHECK(predicted(run) == kSpared);  // nobody has been passed yet
  run.reader->run();
  for (uint64_t released = 0; released < kLayerExperts; ++released) {
    run.check(layer(0)[run.next().position]);
    CHECK(predicted(run) == std::min<uint64_t>(kSpared + released, kSweepReads));
  }
  CHECK(run.next().kind == RequestStep::Kind::finished);
  run.engine->end_request();
  run.reader->run();  // while attention is computed
  const std::vector<uint64_t>& log = run.reader->log;
  CHECK(std::ranges::is_sorted(log, {}, layer_of));  // all reads of the present layer come first
  CHECK(std::set(log.begin(), log.end()).size() == kLayerExperts + kSweepReads);
  run.engine->begin_request(layer(1), HandOutOrder::as_available);
  for (uint64_t there = 0; there < kSweepReads; ++there) CHECK(run.next().kind == RequestStep::Kind::record);
  CHECK(run.next().kind == RequestStep::Kind::waiting);
  run.reader->run();
  for (uint64_t left = kLayerExperts - kSweepReads; left > 0; --left) run.check(layer(1)[run.next().position]);
  run.engine->end_request();
}

void test_the_likeliest_come_first_and_each_is_read_once() {
  Stepped run = sweeping(kLayerExperts + kSpared);
  const std::vector<RecordIndex> likely = {31, 20, 16, 20, 29};
  serve(run, layer(0), likely);
  run.reader->run();
  std::vector<uint64_t> ahead;
  for (const uint64_t tag : run.reader->log) {
    if (layer_of(tag) == 1 && std::ranges::find(ahead, tag) == ahead.end()) ahead.push_back(tag);
  }
  CHECK((ahead == std::vector<uint64_t>{31, 20, 16, 29}));
  serve(run, layer(1), {});
  for (const RecordIndex record : layer(1)) {
    const uint64_t chunks = run.model.record(record).length / 4096;
    CHECK(static_cast<uint64_t>(std::ranges::count(run.reader->log, uint64_t{record})) == chunks);
  }
  const EngineCounters counters = run.engine->counters();
  CHECK(counters.prefetched == 4 && counters.misses == 2 * kLayerExperts - 4 && counters.look_ahead.wasted == 0);
}

// The last layer is in memory, of the others as much as finds room beside it.
void test_nobody_makes_room_who_will_be_asked_for() {
  Stepped run = sweeping(2 * kLayerExperts + kSpared);
  serve(run, layer(2), {});
  serve(run, layer(0), layer(1));
  run.reader->run();
  CHECK(predicted(run) == kSweepReads);
  for (const RecordIndex record : layer(2)) CHECK(run.engine->resident(record));
  serve(run, layer(1), layer(2));
  serve(run, layer(2), {});
  CHECK(run.engine->counters().hits == kLayerExperts);
}

// Whatever is predicted, a request finds slots, and its reads come first; in ever so small a pool.
void test_a_request_is_never_starved(HandOutOrder order) {
  for (const uint32_t slots : {2U, 3U, 4U, 5U, 8U, 13U}) {
    Stepped run = sweeping(slots);
    std::mt19937 generator(slots);
    std::vector<RecordIndex> next = layer(0);
    for (uint32_t request = 0; request < 6 * kLayers; ++request) {
      const std::vector<RecordIndex> records = next;
      next = layer((request + 1) % kLayers);
      std::vector<RecordIndex> likely = request % 4 == 0 ? layer((request + 2) % kLayers) : next;  // some are wrong
      std::ranges::shuffle(likely, generator);
      const size_t before = run.reader->log.size();
      const uint64_t reads = predicted(run);
      serve(run, records, likely, order);
      const auto own = [&](uint64_t tag) { return layer_of(tag) == layer_of(records.front()); };
      CHECK(std::all_of(run.reader->log.begin() + static_cast<ptrdiff_t>(before), run.reader->log.end(), own));
      CHECK(predicted(run) - reads <= std::min<uint64_t>(kSweepReads, slots - ExpertCache::kSlotsMin));
      for (uint32_t chunks = generator() % 20; chunks > 0; --chunks) run.reader->step();
    }
    const EngineCounters counters = run.engine->counters();
    CHECK(counters.hits + counters.misses + counters.prefetched == 6 * kLayers * kLayerExperts);
    CHECK((counters.prefetched > 0) == (slots > ExpertCache::kSlotsMin));
    CHECK(counters.look_ahead.predicted >= counters.prefetched + counters.look_ahead.wasted);
  }
}

// What is read ahead is not a hit, and costs no more of them than slots go round with it.
void test_look_ahead_costs_the_slots_that_go_round() {
  for (const uint32_t slots : {20U, 26U, 34U, 42U}) {
    std::vector<uint64_t> hits;
    for (const bool ahead : {false, true}) {
      Stepped run = sweeping(slots);
      for (uint32_t request = 0; request < 12 * kLayers; ++request) {
        const uint32_t present = request % kLayers;
        if (ahead && present == 0) run.engine->predict_sweep(layer(0));
        run.reader->run();
        serve(run, layer(present), ahead && present + 1 < kLayers ? layer(present + 1) : std::vector<RecordIndex>{});
        run.reader->run();
      }
      const EngineCounters counters = run.engine->counters();
      hits.push_back(counters.hits);
      CHECK(counters.look_ahead.wasted == 0 && (counters.prefetched > 0) == ahead);
    }
    CHECK(hits[1] + 12 * uint64_t{kSweepReads} >= hits[0]);
  }
}

void test_the_first_layer_is_read_from_the_beginning_of_a_pass() {
  Stepped run = sweeping(2 * kLayerExperts + kSpared);
  serve(run, layer(1), {});
  serve(run, layer(2), {});
  const uint64_t before = run.resident();
  CHECK(before == 2 * kLayerExperts);
  run.engine->predict_sweep(layer(0));
  CHECK(predicted(run) == kSweepReads && run.resident() == before - (kSweepReads - kSpared));
  run.reader->run();
  run.engine->begin_request(layer(0), HandOutOrder::as_available);
  for (uint64_t there = 0; there < kSweepReads; ++there) CHECK(run.next().kind == RequestStep::Kind::record);
  EXPECT_ERROR(std::logic_error, run.engine->predict_sweep(layer(0)));
  run.engine->end_request();
  CHECK(run.engine->counters().prefetched == kSweepReads);
  EXPECT_ERROR(std::invalid_argument, run.engine->predict_sweep({kLayers * kLayerExperts}));

  Stepped unused = sweeping(kLayers * kLayerExperts - 1);  // free slots are used by all of them
  unused.engine->predict_sweep(layer(0));
  CHECK(predicted(unused) == kLayerExperts);
}

// A step that asks for ten of sixteen is a pass, too, but not a prompt.
void test_steps_of_many_sequences_read_fewer_ahead() {
  Stepped run = sweeping(kLayerExperts + kSpared);
  serve(run, layer(2), {});
  const std::vector<RecordIndex> all = layer(0);
  serve(run, {all.begin(), all.begin() + 10}, layer(1));
  run.reader->run();
  CHECK(predicted(run) == kTurningInSteps.ahead);
  serve(run, layer(1), layer(2));
  CHECK(predicted(run) == kTurningInSteps.ahead + kSweepReads);
}

// From pass to pass: what was begun for the first layer before it was known what it will ask for goes on, and what is
// known then comes next.
void test_the_next_pass_is_predicted_twice() {
  Stepped run = sweeping(kLayerExperts + kSpared);
  serve(run, layer(1), {});
  serve(run, layer(2), {0, 1, 2, 3});
  CHECK(predicted(run) == 4);
  CHECK(run.reader->step());
  const std::vector<RecordIndex> known = {2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  CHECK(run.engine->predict_next(known, true).size() == known.size());  // of none of them all is there
  CHECK(predicted(run) == kSweepReads);
  run.reader->run();
  serve(run, known, {});
  const EngineCounters counters = run.engine->counters();
  CHECK(counters.prefetched == kSweepReads - 2 && counters.look_ahead.wasted == 2);  // 0 and 1 are not asked for
}

// A pass that turns out otherwise: everything is dropped, and a decoding step finds the slots that it needs.
void test_what_is_not_asked_for_is_dropped() {
  Stepped run = sweeping(kLayerExperts + kSpared);
  serve(run, layer(0), layer(1));
  CHECK(predicted(run) == kSweepReads);
  CHECK(run.reader->step());
  serve(run, {40, 41}, {});
  run.reader->run();
  serve(run, {40, 42}, {});
  const EngineCounters counters = run.engine->counters();
  CHECK(counters.prefetched == 0 && counters.hits == 1 && counters.look_ahead.wasted == 1);
  CHECK(counters.look_ahead.wasted_bytes == 4096 && predicted(run) == kSweepReads);
  CHECK(std::ranges::count_if(run.reader->log, [](uint64_t tag) { return layer_of(tag) == 1; }) == 1);
  run.reader->run();
  run.engine->resize_pool(0, kLayerExperts);  // nobody stayed pinned
}

void test_requests_that_end_early_and_pools_that_change() {
  Stepped run = sweeping(kLayerExperts + kSpared);
  run.engine->begin_request(layer(0), HandOutOrder::as_available);
  run.engine->predict(layer(1));
  run.engine->abandon_request();
  const uint64_t reads = predicted(run);
  serve(run, layer(1), layer(2));
  CHECK(predicted(run) == reads + kSweepReads);
  run.reader->run();
  run.engine->resize_pool(0, 12);
  serve(run, layer(2), layer(0));
  run.reader->run();
  run.engine->resize_pool(0, 30);
  run.engine->predict_sweep(layer(0));
  run.reader->run();
  run.engine->resize_pool(0, 20);
  serve(run, layer(0), layer(1));
  run.engine->begin_request(layer(1), HandOutOrder::as_available);
  run.engine->predict(layer(2));
  run.engine->close();  // with reads under way, and others without a slot
}

void test_damage_is_an_error_of_who_asks_for_it() {
  Stepped run = sweeping(kLayerExperts + kSpared);
  run.model.flip_byte(run.model.record(20).offset + 70);
  serve(run, layer(0), {20, 21});
  run.reader->run();
  run.engine->begin_request(layer(1), HandOutOrder::ascending);
  run.engine->predict(layer(2));
  run.reader->run();
  const auto error = EXPECT_ERROR(RecordError, while (run.next().kind != RequestStep::Kind::waiting) run.reader->run());
  CHECK(error.record() == 20 && error.fault() == RecordFault::checksum_mismatch);
  run.engine->end_request();
  serve(run, layer(2), {});
}

// Real threads, and policies that are replaced by replays: requests get the weights that they ask for.
void test_random_passes(IoBackend backend, bool replayed) {
  const PackedModel model("fx3", kLayers * kLayerExperts, 1);
  for (const uint32_t slots : {3U, 12U, 20U, 40U}) {
    EngineOptions options = model.options(slots);
    options.reader.backend = backend;
    options.policy_parameters.requests_per_step = kLayers;
    if (replayed) options.policy_replay = ReplayOptions{.requests_per_step = kLayers};
    Engine engine(model.table(), options);
    load_dense(engine);
    engine.enable_look_ahead(kSpared);
    std::mt19937 generator(slots);
    for (uint32_t request = 0; request < 60; ++request) {
      std::vector<RecordIndex> records = layer(request % kLayers);
      std::vector<RecordIndex> next = layer((request + generator() % 8 / 7 + 1) % kLayers);
      std::ranges::shuffle(records, generator);
      records.resize(generator() % 4 == 0 ? 3 : 8 + generator() % 9);
      if (request % kLayers == 0) engine.predict_sweep(layer(generator() % 5 / 4));
      engine.begin_request(records, generator() % 2 == 0 ? HandOutOrder::ascending : HandOutOrder::as_available);
      engine.predict(next);
      if (generator() % 8 == 0) {
        engine.abandon_request();
        continue;
      }
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
      if (request % 20 == 19) engine.resize_pool(0, slots + static_cast<uint32_t>(generator() % 4));
    }
    const EngineCounters counters = engine.counters();
    CHECK(counters.prefetched > 0);
    CHECK(counters.look_ahead.predicted >= counters.prefetched + counters.look_ahead.wasted);
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_the_next_layer_is_read_before_it_asks();
  zipmoe::test_the_likeliest_come_first_and_each_is_read_once();
  zipmoe::test_nobody_makes_room_who_will_be_asked_for();
  for (const auto order : {zipmoe::HandOutOrder::as_available, zipmoe::HandOutOrder::ascending}) {
    zipmoe::test_a_request_is_never_starved(order);
  }
  zipmoe::test_look_ahead_costs_the_slots_that_go_round();
  zipmoe::test_the_first_layer_is_read_from_the_beginning_of_a_pass();
  zipmoe::test_steps_of_many_sequences_read_fewer_ahead();
  zipmoe::test_the_next_pass_is_predicted_twice();
  zipmoe::test_what_is_not_asked_for_is_dropped();
  zipmoe::test_requests_that_end_early_and_pools_that_change();
  zipmoe::test_damage_is_an_error_of_who_asks_for_it();
  for (const bool replayed : {false, true}) {
    zipmoe::test_random_passes(zipmoe::IoBackend::threads, replayed);
    if (zipmoe::uring_refusal().empty()) zipmoe::test_random_passes(zipmoe::IoBackend::uring, replayed);
  }
  std::puts("sweep_ahead_test: ok");
  return 0;
}
