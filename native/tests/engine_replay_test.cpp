// An engine whose policy is chosen by replay: it evicts as the replay alone does, chooses when the replay does, and
// what is no evidence changes nothing.
#include <random>
#include <utility>

#include "cache/replayed_pools.hpp"
#include "tests/packed_model.hpp"

using namespace std::chrono_literals;

namespace zipmoe {
namespace {

const std::vector<PolicyCandidate> kCandidates = {{"lfu"}, {"zipmoe", 4}, {"lru"}, {"lfuda"}};

// One pool of whole records, served one request after the other.
struct Replayed {
  Replayed(uint32_t expert_count, uint32_t slots, std::vector<PolicyCandidate> candidates)
      : model("fx3", expert_count, 1), experts(expert_count), engine(model.table(), options(slots, candidates)) {
    load_dense(engine);
    replay.candidates = std::move(candidates);
  }
  EngineOptions options(uint32_t slots, const std::vector<PolicyCandidate>& candidates) const {
    EngineOptions result = model.options(slots);
    result.policy_replay.emplace().candidates = candidates;
    return result;
  }
  // What the engine replays.
  ReplayedPool pool(uint32_t slots) const {
    const uint32_t records = experts + 2;
    ReplayedPool result;
    result.options.experts = records;
    result.options.slots[Residency::both_chunks] = slots;
    result.options.tolerance = records;
    result.users = experts;
    result.costs[static_cast<size_t>(Residency::miss)] = 4096;
    return result;
  }
  void request(const std::vector<RecordIndex>& records) {
    engine.begin_request(records, HandOutOrder::ascending);
    while (engine.next_expert(1000ms).kind != RequestStep::Kind::finished) {
    }
    engine.end_request();
  }
  void check_choice(const PolicyReplay& expected) const {
    CHECK(engine.policy() == expected.chosen().description());
    CHECK(engine.counters().policy_changes == expected.changes());
  }
  void check_residents(const LayerPools& expected) const {
    for (RecordIndex record = 0; record < experts; ++record) {
      CHECK(engine.resident(record) == (expected.residency(record) != Residency::miss));
    }
  }

  PackedModel model;
  uint32_t experts;
  Engine engine;
  ReplayOptions replay;
};

// Two favourites, with a scan over the others between them.
RecordIndex favourite_or_scan(uint32_t step) { return step % 2 == 0 ? step / 2 % 2 : 2 + step * 7 % 10; }

// Working sets of three that follow each other.
RecordIndex from_working_set(uint32_t step, std::mt19937& random) {
  return step / 15 * 3 % 12 + static_cast<RecordIndex>(random() % 3);
}

void test_a_pool_that_held_everybody_follows_its_replay_when_it_shrinks() {
  Replayed run(12, 12, kCandidates);
  ReplayedPools twin({run.pool(12)}, run.replay);
  std::mt19937 random(3);
  uint64_t changes_while_contested = 0;
  for (const auto& [slots, recent] : {std::pair{12U, false}, {4U, true}, {12U, false}, {3U, false}, {4U, true}}) {
    run.engine.resize_pool(0, slots);
    twin.resize(0, {{0, slots, 0, 0}});
    const uint64_t changes = twin.replay().changes();
    for (uint32_t step = 0; step < 200; ++step) {
      const RecordIndex wanted = recent ? from_working_set(step, random) : favourite_or_scan(step);
      run.request({wanted});
      twin.access(0, std::vector<uint32_t>{wanted});
      run.check_choice(twin.replay());
      run.check_residents(twin.pools(0));
    }
    if (slots == 12) {
      CHECK(twin.replay().changes() == changes);  // nobody has to make room
    } else {
      changes_while_contested += twin.replay().changes() - changes;
    }
  }
  CHECK(changes_while_contested >= 2);
}

void test_passes_through_all_layers_are_heard_and_are_no_evidence() {
  constexpr uint32_t experts = 24;
  constexpr uint32_t slots = 14;
  Replayed run(experts, slots, {{"lfu"}, {"lru"}});
  PolicyReplay twin({run.pool(slots)}, run.replay);
  PolicyReplay credulous({run.pool(slots)}, run.replay);
  std::mt19937 random(5);
  for (uint32_t step = 0; step < 120; ++step) {  // a window of 14 that wanders slowly: recency would help
    std::vector<RecordIndex> wanted;
    const auto left_out = static_cast<uint32_t>(random() % 13);
    for (uint32_t i = 0; i < 14; ++i) {
      if (i != left_out && i != left_out + 1) wanted.push_back((step / 4 + i) % experts);
    }
    run.request(wanted);
    twin.request(0, wanted, false);
    credulous.request(0, wanted);
    run.check_choice(twin);
  }
  CHECK(credulous.changes() > 0 && twin.changes() == 0);
  for (uint32_t step = 0; step < 300; ++step) {  // evidence between passes
    std::vector<RecordIndex> wanted = {(step / 30 * 3 + static_cast<RecordIndex>(random() % 16)) % experts};
    if (step % 10 == 0) {
      wanted.clear();
      for (RecordIndex record = 0; record < experts; record += 2) wanted.push_back(record);
    }
    run.request(wanted);
    twin.request(0, wanted, wanted.size() == 1);
    run.check_choice(twin);
  }
}

void test_slots_for_predictions_are_not_the_ghosts() {
  Replayed run(12, 6, kCandidates);
  run.engine.enable_look_ahead(2);
  ReplayedPools twin({run.pool(4)}, run.replay);
  std::mt19937 random(9);
  for (uint32_t step = 0; step < 200; ++step) {
    const RecordIndex wanted = from_working_set(step, random);
    run.request({wanted});
    twin.access(0, std::vector<uint32_t>{wanted});
    run.check_choice(twin.replay());
    run.check_residents(twin.pools(0));
  }
  CHECK(twin.replay().changes() >= 1);
  // Where everybody has a slot none are kept.
  for (const auto& [slots, of_them] : {std::pair{12U, 12U}, {5U, 3U}, {7U, 5U}}) {
    run.engine.resize_pool(0, slots);
    twin.resize(0, {{0, of_them, 0, 0}});
    for (uint32_t step = 0; step < 150; ++step) {
      const RecordIndex wanted = slots == 5 ? favourite_or_scan(step) : from_working_set(step, random);
      run.request({wanted});
      twin.access(0, std::vector<uint32_t>{wanted});
      run.check_choice(twin.replay());
    }
  }
}

void test_requests_that_are_given_up_are_not_heard() {
  Replayed run(12, 4, kCandidates);
  PolicyReplay twin({run.pool(4)}, run.replay);
  std::mt19937 random(7);
  for (uint32_t step = 0; step < 300; ++step) {
    if (step % 3 == 0) {
      run.engine.begin_request({static_cast<RecordIndex>(random() % 12)}, HandOutOrder::as_available);
      run.engine.abandon_request();
      run.check_choice(twin);
    }
    const RecordIndex wanted = from_working_set(step, random);
    run.request({wanted});
    twin.request(0, std::vector<uint32_t>{wanted});
    run.check_choice(twin);
  }
  CHECK(twin.changes() >= 1 && run.engine.counters().requests == 300);
}

void test_only_the_request_that_has_begun_is_the_one_that_is_computed() {
  Replayed run(6, 4, {{"lru"}});
  const std::vector<RecordIndex> begun = {2, 0, 3};
  EXPECT_ERROR(std::invalid_argument, run.engine.require_begun(begun));
  run.engine.begin_request(begun, HandOutOrder::as_available);
  run.engine.require_begun(begun);
  for (const std::vector<RecordIndex>& other :
       {std::vector<RecordIndex>{}, {2}, {2, 0}, {2, 0, 3, 1}, {0, 2, 3}, {2, 0, 1}}) {
    EXPECT_ERROR(std::invalid_argument, run.engine.require_begun(other));
  }
  run.engine.next_expert(1000ms);
  EXPECT_ERROR(std::invalid_argument, run.engine.require_begun(begun));  // one of them would be left out
  run.engine.end_request();
  EXPECT_ERROR(std::invalid_argument, run.engine.require_begun(begun));
  run.engine.close();
  EXPECT_ERROR(std::logic_error, run.engine.require_begun(begun));
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_a_pool_that_held_everybody_follows_its_replay_when_it_shrinks();
  zipmoe::test_passes_through_all_layers_are_heard_and_are_no_evidence();
  zipmoe::test_slots_for_predictions_are_not_the_ghosts();
  zipmoe::test_requests_that_are_given_up_are_not_heard();
  zipmoe::test_only_the_request_that_has_begun_is_the_one_that_is_computed();
  std::puts("engine_replay_test: ok");
  return 0;
}
