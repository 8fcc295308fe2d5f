// Who makes room for predictions: nobody who is predicted, too, and during a pass through all layers nobody whom a
// later layer is likely to ask for.
#include <algorithm>
#include <random>

#include "tests/stepped_engine.hpp"

namespace zipmoe {
namespace {

bool holds(const std::set<RecordIndex>& found, RecordIndex record) { return found.contains(record); }

void test_who_is_predicted_does_not_make_room_for_others_that_are() {
  struct Case {
    std::vector<RecordIndex> predicted;
    uint64_t reads;  // of those that are absent, as far as somebody may be evicted
  };
  const Case cases[] = {{{7, 0}, 1},       {{0, 7}, 1},       {{7, 0, 1}, 1},
                        {{0, 7, 1, 8}, 1}, {{7, 0, 0, 8}, 2}, {{7, 2, 1, 0}, 0}};
  for (const auto& [predicted, reads] : cases) {
    Stepped run(5, 2);
    run.engine->begin_request({0, 1, 2}, HandOutOrder::as_available);
    run.engine->predict({5, 6});
    run.finish_request({0, 1, 2});
    run.engine->begin_request({5, 6}, HandOutOrder::as_available);  // they take the spared slots with them
    CHECK((run.residents() == std::set<RecordIndex>{0, 1, 2, 5, 6}));
    run.engine->predict(predicted);  // now others must make room; 0 would be the first
    run.finish_request({5, 6});
    CHECK(run.engine->counters().look_ahead.predicted == 2 + reads);
    std::vector<RecordIndex> kept;
    for (const RecordIndex record : std::set<RecordIndex>(predicted.begin(), predicted.end())) {
      if (record <= 2) kept.push_back(record);
    }
    for (const RecordIndex record : kept) CHECK(run.engine->resident(record));
    const uint64_t hits = run.engine->counters().hits;
    const auto chunks = std::ranges::count_if(run.reader->log, [](uint64_t tag) { return tag <= 2; });
    run.engine->begin_request(kept, HandOutOrder::as_available);
    run.finish_request(kept);
    CHECK(run.engine->counters().hits == hits + kept.size());
    CHECK(std::ranges::count_if(run.reader->log, [](uint64_t tag) { return tag <= 2; }) == chunks);
    run.engine->resize_pool(0, 4);  // nobody stayed pinned
  }
}

constexpr uint32_t kLayers = 3;
constexpr uint32_t kLayerExperts = 24;
constexpr uint32_t kSpared = 2;

std::vector<RecordIndex> half_a_layer(std::mt19937& generator, uint32_t layer) {
  std::vector<RecordIndex> records(kLayerExperts);
  for (uint32_t i = 0; i < kLayerExperts; ++i) records[i] = layer * kLayerExperts + i;
  std::ranges::shuffle(records, generator);
  records.resize(kLayerExperts / 2);
  return records;
}

// One request from its beginning to its end; `predicted` before its last expert is done.
void serve(Stepped& run, const std::vector<RecordIndex>& records, HandOutOrder order,
           const std::vector<RecordIndex>& predicted) {
  run.engine->begin_request(records, order);
  std::vector<RecordIndex> handed_out;
  for (;;) {
    const RequestStep step = run.next();
    if (step.kind == RequestStep::Kind::finished) break;
    if (step.kind == RequestStep::Kind::waiting) {
      CHECK(run.reader->step());  // a request that waits has reads
      continue;
    }
    handed_out.push_back(records[step.position]);
    run.check(handed_out.back());
    if (handed_out.size() == records.size()) run.engine->predict(predicted);
  }
  run.reader->run();
  run.engine->end_request();
  CHECK(std::set(handed_out.begin(), handed_out.end()) == std::set(records.begin(), records.end()));
  if (order == HandOutOrder::ascending) CHECK(std::ranges::is_sorted(handed_out));
}

// Passes that ask every layer for half of its experts, each with two right predictions for the next layer.
void test_a_pass_keeps_what_later_layers_will_ask_for(uint32_t slots, HandOutOrder order) {
  Stepped run(slots, kSpared, kLayers * kLayerExperts, kLayers);
  std::mt19937 generator(slots);
  uint64_t predicted_before = 0;
  bool somebody_stayed = false;
  bool more_than_spared = false;
  std::vector<RecordIndex> records = half_a_layer(generator, 0);
  for (uint32_t request = 0; request < 10 * kLayers; ++request) {
    const std::vector<RecordIndex> next = half_a_layer(generator, (request + 1) % kLayers);
    std::vector<RecordIndex> predicted = {next[0], next[1], next[2], next[3]};
    const std::set<RecordIndex> before = run.residents();
    const EngineCounters counted = run.engine->counters();
    serve(run, records, order, predicted);
    const std::set<RecordIndex> after = run.residents();
    const RecordIndex last = *std::ranges::max_element(records);
    const auto awaited = std::ranges::count_if(before, [&](RecordIndex record) { return record > last; });
    const auto lost =
        std::ranges::count_if(before, [&](RecordIndex record) { return record > last && !holds(after, record); });
    CHECK(lost <= static_cast<ptrdiff_t>(kTurningInSteps.all()));
    if (static_cast<uint64_t>(awaited) + records.size() + kSpared <= slots) {
      CHECK(lost == 0 || slots > 2 * kTurningInSteps.all());  // a layer may hold more than its share
      somebody_stayed = somebody_stayed || awaited > 0;
    }
    const EngineCounters now = run.engine->counters();
    CHECK(now.prefetched - counted.prefetched == predicted_before);  // they came true, all of them
    CHECK(now.look_ahead.wasted == 0);
    predicted_before = now.look_ahead.predicted - counted.look_ahead.predicted;
    CHECK(predicted_before <= predicted.size());
    more_than_spared = more_than_spared || predicted_before > kSpared;
    records = next;
  }
  CHECK(somebody_stayed || slots < 26);
  CHECK(more_than_spared);  // what the pass has passed makes room as well
  CHECK(run.engine->counters().prefetched > 0);
  CHECK(run.resident() <= slots);
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_who_is_predicted_does_not_make_room_for_others_that_are();
  for (const uint32_t slots : {18U, 26U, 34U, 50U}) {
    for (const auto order : {zipmoe::HandOutOrder::as_available, zipmoe::HandOutOrder::ascending}) {
      zipmoe::test_a_pass_keeps_what_later_layers_will_ask_for(slots, order);
    }
  }
  std::puts("look_ahead_eviction_test: ok");
  return 0;
}
