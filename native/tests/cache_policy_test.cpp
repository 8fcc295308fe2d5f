// Eviction policies and pools: small cases worked out by hand, and invariants under random requests.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/activation_counts.hpp"
#include "cache/eviction_policy.hpp"
#include "cache/expert_cache.hpp"
#include "cache/layer_pools.hpp"
#include "engine_test_support.hpp"

namespace zipmoe {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
const EvictionPolicy::Predicate kAny = [](RecordIndex) { return true; };

void request(EvictionPolicy& policy, std::vector<RecordIndex> records) { policy.requested(records); }

// A request of a record that becomes or is resident.
void use(EvictionPolicy& policy, RecordIndex record, bool miss) {
  request(policy, {record});
  if (miss) policy.admitted(record);
  policy.used(record);
}

RecordIndex evict(EvictionPolicy& policy) {
  const RecordIndex record = policy.victim(kAny).value();
  policy.removed(record);
  return record;
}

void test_every_name_makes_a_policy() {
  for (const std::string_view name : eviction_policy_names()) {
    const auto policy = make_eviction_policy(name, 3);
    CHECK(policy->name() == name);
    CHECK(!policy->victim(kAny));
    use(*policy, 1, true);
    CHECK(policy->victim(kAny) == 1U);
    CHECK(!policy->victim([](RecordIndex record) { return record != 1; }));
    policy->removed(1);
    CHECK(!policy->victim(kAny));
  }
  EXPECT_ERROR(std::invalid_argument, make_eviction_policy("crystal ball", 1));
  EXPECT_ERROR(std::invalid_argument, make_eviction_policy("zipmoe", 1, {.half_life_steps = 0}));
  EXPECT_ERROR(std::invalid_argument, make_eviction_policy("zipmoe", 1, {.half_life_steps = std::nan("")}));
  EXPECT_ERROR(std::invalid_argument, make_eviction_policy("zipmoe", 1, {.requests_per_step = 0}));
}

void test_fifo_ignores_uses() {
  const auto policy = make_eviction_policy("fifo", 4);
  for (const RecordIndex record : {2U, 0U, 3U}) use(*policy, record, true);
  use(*policy, 2, false);
  CHECK(!policy->values_use());
  CHECK(evict(*policy) == 2U && evict(*policy) == 0U);
  use(*policy, 2, true);
  CHECK(evict(*policy) == 3U && evict(*policy) == 2U);
}

void test_lfu_remembers_counts_of_what_it_evicted() {
  const auto policy = make_eviction_policy("lfu", 4);
  use(*policy, 0, true);
  use(*policy, 0, false);
  use(*policy, 1, true);
  use(*policy, 2, true);
  CHECK(evict(*policy) == 1U);  // as often as 2, longer unused
  use(*policy, 1, true);        // its second use
  CHECK(evict(*policy) == 2U && evict(*policy) == 0U && evict(*policy) == 1U);
}

void test_lfuda_lets_former_favourites_go() {
  const auto policy = make_eviction_policy("lfuda", 4);
  for (int i = 0; i < 3; ++i) use(*policy, 0, i == 0);  // priority 3
  use(*policy, 1, true);                                // 1
  CHECK(evict(*policy) == 1U);                          // age 1
  use(*policy, 2, true);                                // 1 + 1
  CHECK(evict(*policy) == 2U);                          // age 2
  use(*policy, 3, true);                                // 1 + 2
  use(*policy, 2, true);                                // 2 + 2
  CHECK(evict(*policy) == 0U);                          // 3, like record 3, but longer unused
  CHECK(evict(*policy) == 3U && evict(*policy) == 2U);
}

void test_marking_spares_what_was_used_in_this_phase() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto policy = make_eviction_policy("marking", 5, {.seed = seed});
    for (RecordIndex record = 0; record < 4; ++record) use(*policy, record, true);
    evict(*policy);  // all were marked: a new phase
    std::vector<RecordIndex> left;
    for (RecordIndex record = 0; record < 4; ++record) {
      if (policy->victim([record](RecordIndex other) { return other == record; })) left.push_back(record);
    }
    CHECK(left.size() == 3);
    use(*policy, left[1], false);
    use(*policy, 4, true);
    std::set<RecordIndex> gone = {evict(*policy), evict(*policy)};
    CHECK(gone == std::set<RecordIndex>({left[0], left[2]}));
    gone = {evict(*policy), evict(*policy)};
    CHECK(gone == std::set<RecordIndex>({left[1], 4}));
  }
}

void test_counts_halve_after_a_half_life() {
  ActivationCounts counts(3, 4);
  for (int i = 0; i < 3; ++i) counts.activate(0, 0);
  CHECK(counts.rank(0) == 0 && counts.rank(1) == 1 && counts.rank(2) == 1);
  counts.activate(1, 8);  // 1 against 3/4
  CHECK(counts.rank(1) == 0 && counts.rank(0) == 1 && counts.rank(2) == 2);
  counts.activate(0, 8);  // 1 + 3/4
  CHECK(counts.rank(0) == 0);
  counts.activate(2, 4000000);  // nothing overflows
  counts.activate(2, 4000000);
  counts.activate(1, 4000000);
  CHECK(counts.rank(2) == 0 && counts.rank(1) == 1 && counts.rank(0) == 2);

  ActivationCounts forever(2, kForever);
  forever.activate(0, 0);
  forever.activate(0, 0);
  forever.activate(1, 1000000);
  CHECK(forever.rank(0) == 0 && forever.rank(1) == 1);
}

void test_zipmoe_steps_are_counted_in_requests() {
  const auto policy = make_eviction_policy("zipmoe", 3, {.half_life_steps = 1, .requests_per_step = 2});
  request(*policy, {0});  // step 0
  request(*policy, {0});
  request(*policy, {1});  // step 1: 1 against 2/2
  CHECK(policy->rank(0) == 0U && policy->rank(1) == 0U);
  request(*policy, {});
  request(*policy, {2});  // step 2: 1 against 1/2 and 2/4
  CHECK(policy->rank(2) == 0U && policy->rank(1) == 1U && policy->rank(0) == 1U);
  CHECK(!make_eviction_policy("lru", 1)->rank(0));
}

// --- pools

constexpr Residency F = Residency::full;
constexpr Residency C = Residency::both_chunks;
constexpr Residency S = Residency::sign_mantissa;
constexpr Residency E = Residency::exponent;
constexpr Residency M = Residency::miss;

std::vector<Residency> before(LayerPools& pools, std::vector<uint32_t> experts) { return pools.access(experts).before; }

std::vector<Transition> moves(LayerPools& pools, std::vector<uint32_t> experts) {
  return pools.access(experts).transitions;
}

void test_what_can_be_reached_without_reading() {
  const std::vector<Residency> all = {F, C, S, E, M};
  for (const Residency from : all) {
    for (const Residency to : all) {
      const bool drop = from == to || to == M || (from == F && to == S) || (from == C && (to == S || to == E));
      CHECK(reachable_without_reading(from, to, false) == drop);
      CHECK(reachable_without_reading(from, to, true) == (from == F ? drop : true));
    }
  }
}

void test_lru_demotes_by_dropping_parts() {
  LayerPools pools({.experts = 6, .slots = {{1, 1, 1, 1}}, .policy = "lru"});
  CHECK(moves(pools, {0}) == std::vector<Transition>({{0, M, F}}));
  CHECK(moves(pools, {1}) == std::vector<Transition>({{0, F, S}, {1, M, F}}));  // C needs the compressed exponents
  CHECK(moves(pools, {2}) == std::vector<Transition>({{0, S, M}, {1, F, S}, {2, M, F}}));
  CHECK(before(pools, {1}) == std::vector<Residency>({S}));  // promoted: 2 goes to S, whose slot is free by then
  CHECK(pools.residency(1) == F && pools.residency(2) == S && pools.residency(0) == M);
  // Two at once: the second finds F taken by its own request and goes to C.
  CHECK(moves(pools, {3, 4}) == std::vector<Transition>({{2, S, M}, {1, F, S}, {3, M, F}, {4, M, C}}));
  CHECK(moves(pools, {3}).empty());
  // 3 was used after 4 and keeps S; from C the exponents can be kept, so 4 moves on to E.
  CHECK(moves(pools, {0, 5}) == std::vector<Transition>({{1, S, M}, {3, F, S}, {0, M, F}, {4, C, E}, {5, M, C}}));
}

void test_fifo_leaves_hits_where_they_are() {
  LayerPools pools({.experts = 3, .slots = {{1, 0, 1, 0}}, .policy = "fifo"});
  moves(pools, {0});
  CHECK(moves(pools, {1}) == std::vector<Transition>({{0, F, S}, {1, M, F}}));
  CHECK(moves(pools, {0}).empty());
  CHECK(moves(pools, {2}) == std::vector<Transition>({{0, S, M}, {1, F, S}, {2, M, F}}));
}

void test_zipmoe_dispatches_by_rank() {
  LayerPools pools({.experts = 5,
                    .slots = {{1, 1, 1, 0}},
                    .policy = "zipmoe",
                    .parameters = {.half_life_steps = kForever},
                    .tolerance = 0});
  for (int i = 0; i < 4; ++i) moves(pools, {0});
  for (int i = 0; i < 3; ++i) moves(pools, {1});
  for (int i = 0; i < 2; ++i) moves(pools, {2});
  CHECK(pools.residency(0) == F && pools.residency(1) == C && pools.residency(2) == S);
  CHECK(moves(pools, {3}).empty());  // rank 3 is beyond every threshold: dropped after use
  CHECK(moves(pools, {3}) == std::vector<Transition>({{2, S, M}, {3, M, S}}));  // as often as 2: rank 2
  // As often as 0, and more recently: 0 has to leave F, and takes the place of the less frequent 3.
  CHECK(moves(pools, {1}) == std::vector<Transition>({{3, S, M}, {0, F, S}, {1, C, F}}));
  CHECK(moves(pools, {2}) == std::vector<Transition>({{0, S, M}, {2, M, S}}));  // S is the last pool for rank 2
  CHECK(moves(pools, {0}) == std::vector<Transition>({{2, S, M}, {1, F, S}, {0, M, F}}));
}

void test_a_newcomer_competes_while_there_is_a_pool_below_for_it() {
  LayerPools pools({.experts = 4,
                    .slots = {{1, 1, 0, 0}},
                    .policy = "zipmoe",
                    .parameters = {.half_life_steps = kForever},
                    .tolerance = 2});
  for (int i = 0; i < 3; ++i) moves(pools, {0});
  CHECK(moves(pools, {1}) == std::vector<Transition>({{1, M, C}}));  // within the tolerance of F, but less frequent
  CHECK(moves(pools, {2}) == std::vector<Transition>({{1, C, M}, {2, M, C}}));  // C is the last pool for it
  CHECK(moves(pools, {1}) == std::vector<Transition>({{2, C, M}, {1, M, C}}));
}

void test_tolerance_lets_newcomers_in() {
  for (const double tolerance : {0.0, 1.0}) {
    LayerPools pools({.experts = 4,
                      .slots = {{0, 1, 0, 0}},
                      .policy = "zipmoe",
                      .parameters = {.half_life_steps = kForever},
                      .tolerance = tolerance});
    moves(pools, {0});
    moves(pools, {0});
    moves(pools, {1});  // rank 1
    CHECK(pools.residency(1) == (tolerance > 0 ? C : M));
  }
  CHECK(LayerPools({.experts = 60}).tolerance() == 6);
  EXPECT_ERROR(std::invalid_argument, LayerPools({.experts = 4, .tolerance = -1}));
  EXPECT_ERROR(std::invalid_argument, LayerPools({.experts = 0}));
}

void test_a_refused_request_changes_nothing() {
  LayerPools pools({.experts = 4, .slots = {{0, 2, 0, 0}}, .policy = "lru"});
  moves(pools, {0, 1});
  EXPECT_ERROR(std::invalid_argument, moves(pools, {2, 3, 2}));
  EXPECT_ERROR(std::out_of_range, moves(pools, {2, 4}));
  CHECK(before(pools, {2, 0, 1}) == std::vector<Residency>({M, C, C}));
}

void test_nobody_moves_to_a_worse_pool_because_it_was_used() {
  LayerPools pools({.experts = 6,
                    .slots = {{0, 4, 2, 0}},
                    .policy = "zipmoe",
                    .parameters = {.half_life_steps = kForever},
                    .tolerance = 0});
  moves(pools, {0});
  pools.resize({{0, 1, 5, 0}});
  for (int i = 0; i < 3; ++i) moves(pools, {1, 2});  // 0 falls to rank 2, which is one for S
  CHECK(pools.residency(0) != M);
  pools.correct(1, M);
  pools.correct(2, M);
  pools.correct(0, C);
  CHECK(moves(pools, {0}).empty());
  CHECK(pools.residency(0) == C);
}

void test_an_expert_that_leaves_f_for_s_needs_a_staged_slot() {
  for (const uint32_t staging : {0U, 1U, 2U}) {
    LayerPools pools({.experts = 8, .slots = {{2, 0, 2, 0}}, .policy = "lru", .staging = staging});
    moves(pools, {0, 1});
    CHECK(pools.occupied(F) == 2);
    moves(pools, {2, 3});
    CHECK(pools.residency(2) == F && pools.residency(3) == F);
    CHECK(pools.occupied(S) == staging);  // the others are lost
    moves(pools, {4});                    // the limit is for one request
    CHECK(pools.occupied(S) == std::min(staging + 1, 2U) * (staging > 0 ? 1 : 0));
  }
}

void test_corrections_move_what_was_booked() {
  LayerPools pools({.experts = 6, .slots = {{0, 1, 1, 1}}, .policy = "lru"});
  moves(pools, {0});
  moves(pools, {1});
  CHECK(pools.residency(1) == C && pools.residency(0) == S);
  pools.correct(1, M);  // its read failed
  CHECK(pools.residency(1) == M && pools.occupied(C) == 0);
  pools.correct(1, M);
  CHECK(moves(pools, {2}) == std::vector<Transition>({{2, M, C}}));  // nobody has to make room
  pools.correct(2, E);
  CHECK(pools.occupied(C) == 0 && pools.occupied(E) == 1);
  CHECK(moves(pools, {2}) == std::vector<Transition>({{2, E, C}}));
  EXPECT_ERROR(std::out_of_range, pools.correct(6, M));
}

void test_shrinking_passes_experts_on_and_growing_moves_nobody() {
  LayerPools pools({.experts = 6, .slots = {{0, 2, 1, 1}}, .policy = "lru"});
  for (const uint32_t expert : {0U, 1U}) moves(pools, {expert});
  CHECK(pools.resize({{0, 1, 1, 1}}) == std::vector<Transition>({{0, C, S}}));
  CHECK(pools.resize({{0, 0, 1, 1}}) == std::vector<Transition>({{0, S, M}, {1, C, S}}));
  CHECK(pools.resize({{0, 2, 1, 1}}).empty());
  CHECK(moves(pools, {2}) == std::vector<Transition>({{2, M, C}}));
  CHECK(pools.resize({{0, 0, 0, 0}}).size() >= 2);
  for (uint32_t expert = 0; expert < 6; ++expert) CHECK(pools.residency(expert) == M);
  CHECK(moves(pools, {1, 2}).empty());
}

// Requests, corrections as after failed reads and other numbers of slots, in any order: no pool over its slots, nobody
// in two pools, and the books of pools that were told the same are the same.
void test_books_balance_under_corrections_and_resizing() {
  std::mt19937 random(23);
  for (const std::string_view name : eviction_policy_names()) {
    for (int round = 0; round < 40; ++round) {
      const uint32_t experts = 2 + random() % 14;
      const auto some_slots = [&] {
        PoolSlots slots;
        for (uint32_t& count : slots.experts) count = random() % 4;
        return slots;
      };
      PoolOptions options{.experts = experts, .slots = some_slots(), .policy = std::string(name)};
      options.parameters = {.half_life_steps = 1.0 + random() % 5, .requests_per_step = 1, .seed = random()};
      options.staging = random() % 4;
      PoolSlots slots = options.slots;
      LayerPools pools(options);
      LayerPools twin(options);
      std::vector<Residency> residency(experts, M);
      const auto follow = [&](const std::vector<Transition>& list, const std::set<uint32_t>& executed) {
        for (const Transition& move : list) {
          CHECK(move.from == residency[move.expert] && move.from != move.to);
          CHECK(reachable_without_reading(move.from, move.to, executed.contains(move.expert)));
          CHECK(executed.contains(move.expert) ? move.to < move.from : move.to > move.from);
          residency[move.expert] = move.to;
        }
      };
      for (int step = 0; step < 120; ++step) {
        if (step % 7 == 6) {
          slots = some_slots();
          const std::vector<Transition> list = pools.resize(slots);
          CHECK(list == twin.resize(slots));
          follow(list, {});
        } else {
          std::set<uint32_t> wanted;
          for (uint32_t i = 1 + random() % 5; i > 0; --i) wanted.insert(random() % experts);
          const std::vector<uint32_t> list(wanted.begin(), wanted.end());
          const AccessOutcome outcome = pools.access(list);
          CHECK(outcome.transitions == twin.access(list).transitions);
          follow(outcome.transitions, wanted);
          if (random() % 3 == 0) {  // the last read failed: what it had is kept, if there is room, or lost
            Residency actual = outcome.before.back();
            if (actual != M && residency[list.back()] != actual && pools.occupied(actual) == slots[actual]) actual = M;
            pools.correct(list.back(), actual);
            twin.correct(list.back(), actual);
            residency[list.back()] = actual;
          }
        }
        PoolSlots held;
        for (uint32_t expert = 0; expert < experts; ++expert) {
          CHECK(pools.residency(expert) == residency[expert]);
          if (residency[expert] != M) ++held[residency[expert]];
        }
        for (Residency pool = F; pool != M; pool = next_pool(pool)) {
          CHECK(held[pool] == pools.occupied(pool) && held[pool] <= slots[pool]);
        }
      }
    }
  }
}

void test_books_balance_under_random_requests() {
  std::mt19937 random(7);
  for (const std::string_view name : eviction_policy_names()) {
    for (int round = 0; round < 60; ++round) {
      const uint32_t experts = 1 + random() % 20;
      PoolOptions options{.experts = experts, .policy = std::string(name)};
      for (uint32_t& slots : options.slots.experts) slots = random() % 2 == 0 ? 0 : random() % (experts + 1);
      options.parameters = {.half_life_steps = 1.0 + random() % 5, .requests_per_step = 1, .seed = random()};
      if (random() % 2 == 0) options.tolerance = random() % experts;
      LayerPools pools(options);
      std::vector<Residency> residency(experts, M);
      std::vector<uint32_t> order(experts);
      std::iota(order.begin(), order.end(), 0U);
      for (int step = 0; step < 50; ++step) {
        std::shuffle(order.begin(), order.end(), random);
        const std::vector<uint32_t> wanted(order.begin(), order.begin() + 1 + random() % experts);
        const AccessOutcome outcome = pools.access(wanted);
        for (size_t i = 0; i < wanted.size(); ++i) CHECK(outcome.before[i] == residency[wanted[i]]);
        for (const Transition& move : outcome.transitions) {
          CHECK(move.from == residency[move.expert] && move.from != move.to);
          const bool executed = std::find(wanted.begin(), wanted.end(), move.expert) != wanted.end();
          CHECK(reachable_without_reading(move.from, move.to, executed));
          if (!executed) CHECK(move.from < move.to);  // others never come closer
          residency[move.expert] = move.to;
        }
        for (uint32_t pool = 0; pool < kPools; ++pool) {
          const auto held = std::count(residency.begin(), residency.end(), static_cast<Residency>(pool));
          CHECK(held == pools.occupied(static_cast<Residency>(pool)) && held <= options.slots.experts[pool]);
        }
        for (uint32_t expert = 0; expert < experts; ++expert) CHECK(pools.residency(expert) == residency[expert]);
      }
    }
  }
}

// --- the engine's single pool

void test_cache_tells_policies_about_every_request() {
  const std::vector<SizeClass> classes = {{.slot_bytes = 4096, .slot_limit = 4, .slots = 2}};
  Arena arena(ExpertCache::reserved_bytes(classes));
  ExpertCache cache(arena, 0, classes, {0, 0, 0, 0}, "zipmoe", {.half_life_steps = kForever});
  const auto fetch = [&cache](RecordIndex record) {
    const std::vector<RecordIndex> wanted = {record};
    cache.requested(wanted);
    if (!cache.resident(record)) {
      CHECK(cache.acquire(record) != nullptr);
      cache.admit(record);
    } else {
      cache.pin(record);
    }
    cache.used(record);
    cache.unpin(record);
  };
  for (const RecordIndex record : {0U, 0U, 1U, 2U}) fetch(record);
  CHECK(cache.resident(0) && !cache.resident(1) && cache.resident(2));  // LRU would have kept 1
  for (const RecordIndex record : {1U, 2U, 3U}) fetch(record);
  CHECK(cache.resident(0) != cache.resident(2) && cache.resident(3));
  EXPECT_ERROR(std::out_of_range, fetch(4));
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_every_name_makes_a_policy();
  zipmoe::test_fifo_ignores_uses();
  zipmoe::test_lfu_remembers_counts_of_what_it_evicted();
  zipmoe::test_lfuda_lets_former_favourites_go();
  zipmoe::test_marking_spares_what_was_used_in_this_phase();
  zipmoe::test_counts_halve_after_a_half_life();
  zipmoe::test_zipmoe_steps_are_counted_in_requests();
  zipmoe::test_what_can_be_reached_without_reading();
  zipmoe::test_lru_demotes_by_dropping_parts();
  zipmoe::test_fifo_leaves_hits_where_they_are();
  zipmoe::test_zipmoe_dispatches_by_rank();
  zipmoe::test_a_newcomer_competes_while_there_is_a_pool_below_for_it();
  zipmoe::test_tolerance_lets_newcomers_in();
  zipmoe::test_a_refused_request_changes_nothing();
  zipmoe::test_nobody_moves_to_a_worse_pool_because_it_was_used();
  zipmoe::test_an_expert_that_leaves_f_for_s_needs_a_staged_slot();
  zipmoe::test_corrections_move_what_was_booked();
  zipmoe::test_shrinking_passes_experts_on_and_growing_moves_nobody();
  zipmoe::test_books_balance_under_corrections_and_resizing();
  zipmoe::test_books_balance_under_random_requests();
  zipmoe::test_cache_tells_policies_about_every_request();
  std::puts("cache_policy_test: ok");
  return 0;
}
