// The choice among policies by replay: what is chosen and when, and that a change moves nobody.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/policy_choice.hpp"
#include "cache/policy_replay.hpp"
#include "cache/replayed_pools.hpp"
#include "engine_test_support.hpp"

namespace zipmoe {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr ResidencyCosts kCosts = {0, 0, 0.3, 0.7, 1};

uint32_t draw(std::mt19937& random, uint32_t below) { return static_cast<uint32_t>(random() % below); }

// --- the choice

bool step(PolicyChoice& choice, std::vector<double> costs) { return choice.step(costs); }

void test_the_cheaper_candidate_takes_over_once() {
  PolicyChoice choice(3, 0, {.window_steps = 32, .least_steps = 8});
  for (int i = 0; i < 7; ++i) CHECK(!step(choice, {10, 8, 9}));
  CHECK(step(choice, {10, 8, 9}) && choice.chosen() == 1);
  for (int i = 0; i < 100; ++i) CHECK(!step(choice, {10, 8, 9}));
  CHECK(choice.changes() == 1 && choice.mean_cost(0) == 10 && choice.mean_cost(2) == 9);
}

void test_equals_never_take_turns() {
  std::mt19937 random(1);
  PolicyChoice choice(4, 2);
  for (int i = 0; i < 1000; ++i) {
    const double cost = static_cast<double>(random() % 100);
    CHECK(!step(choice, {cost, cost, cost, cost}));
  }
  PolicyChoice free(2, 1);
  for (int i = 0; i < 200; ++i) CHECK(!step(free, {0, 0}));  // everything is in memory
  CHECK(choice.chosen() == 2 && free.chosen() == 1 && choice.changes() == 0);
}

void test_less_than_the_margin_is_no_reason() {
  PolicyChoice choice(2, 0, {.margin = 0.05});
  for (int i = 0; i < 300; ++i) CHECK(!step(choice, {100, 96}));
  PolicyChoice eager(2, 0, {.margin = 0.03});
  for (int i = 0; i < 300; ++i) step(eager, {100, 96});
  CHECK(eager.chosen() == 1 && eager.changes() == 1);
}

void test_what_chance_explains_is_no_reason() {
  // One dear step is 8 % of the cost of all; the standard error of the mean difference is as large as the difference.
  PolicyChoice choice(2, 0, {.window_steps = 64, .least_steps = 8, .standard_errors = 2});
  for (int i = 0; i < 200; ++i) CHECK(!step(choice, {i % 64 == 20 ? 6.0 : 1.0, 1.0}));
  CHECK(choice.chosen() == 0);
  // What makes a step dear for everybody is no evidence, and hides none.
  std::mt19937 random(3);
  for (int i = 0; i < 64; ++i) {
    const double both = static_cast<double>(random() % 1000);
    step(choice, {both + 20, both});
  }
  CHECK(choice.chosen() == 1);
}

void test_old_steps_are_forgotten() {
  PolicyChoice choice(2, 0, {.window_steps = 32, .least_steps = 8});
  for (int i = 0; i < 500; ++i) step(choice, {10, 5});
  CHECK(choice.chosen() == 1);
  int steps = 0;
  while (choice.chosen() == 1) {
    step(choice, {5, 10});
    ++steps;
  }
  CHECK(steps > 16 && steps <= 32);
  CHECK(choice.changes() == 2);
}

void test_impossible_choices_are_refused() {
  EXPECT_ERROR(std::invalid_argument, PolicyChoice(2, 2));
  EXPECT_ERROR(std::invalid_argument, PolicyChoice(2, 0, {.window_steps = 4, .least_steps = 8}));
  EXPECT_ERROR(std::invalid_argument, PolicyChoice(2, 0, {.window_steps = 4, .least_steps = 1}));
  EXPECT_ERROR(std::invalid_argument, PolicyChoice(2, 0, {.margin = -0.1}));
  PolicyChoice choice(2, 0);
  EXPECT_ERROR(std::invalid_argument, step(choice, {1, 2, 3}));
}

// --- policies that go on with what others left

std::vector<RecordIndex> drained(EvictionPolicy& policy) {
  std::vector<RecordIndex> order;
  while (const auto victim = policy.victim([](RecordIndex) { return true; })) {
    order.push_back(*victim);
    policy.removed(*victim);
  }
  return order;
}

void test_a_policy_holds_what_it_is_given() {
  std::mt19937 random(5);
  for (const std::string_view name : eviction_policy_names()) {
    const auto policy = make_eviction_policy(name, 8);
    for (int i = 0; i < 40; ++i) {
      const std::vector<RecordIndex> wanted = {draw(random, 8)};
      policy->requested(wanted);
      if (i < 3) policy->admitted(wanted[0]);
    }
    const std::vector<RecordIndex> residents = {6, 1, 7, 2};
    const auto held = policy->holding(residents);
    CHECK(held->name() == name);
    const std::vector<RecordIndex> order = drained(*held);
    CHECK(std::set<RecordIndex>(order.begin(), order.end()) == std::set<RecordIndex>({1, 2, 6, 7}));
    if (name == "lru") CHECK(order == residents);
    CHECK(drained(*policy->holding({})).empty());
  }
}

void test_lfu_and_decayed_counts_remember_what_others_evicted() {
  for (const std::string_view name : {"lfu", "zipmoe"}) {
    const auto policy = make_eviction_policy(name, 4, {.half_life_steps = kForever});
    for (const RecordIndex record : {3U, 3U, 3U, 0U, 0U, 1U}) policy->requested(std::vector<RecordIndex>{record});
    CHECK(drained(*policy->holding(std::vector<RecordIndex>{3, 0, 1, 2})) == std::vector<RecordIndex>({2, 1, 0, 3}));
  }
}

void test_adopting_the_own_memory_changes_nothing() {
  std::mt19937 random(11);
  for (const std::string_view name : eviction_policy_names()) {
    for (int round = 0; round < 20; ++round) {
      PoolOptions options{.experts = 12, .policy = std::string(name), .tolerance = 2.0};
      for (uint32_t& slots : options.slots.experts) slots = random() % 4;
      options.parameters.half_life_steps = 3;
      LayerPools pools(options);
      LayerPools other(options);
      std::vector<uint32_t> last_use(12);
      uint32_t uses = 0;
      for (int i = 0; i < 80; ++i) {
        std::set<uint32_t> wanted;
        for (uint32_t k = 1 + random() % 4; k > 0; --k) wanted.insert(random() % 12);
        std::vector<uint32_t> experts(wanted.begin(), wanted.end());
        std::shuffle(experts.begin(), experts.end(), random);
        CHECK(pools.access(experts).transitions == other.access(experts).transitions);
        for (const uint32_t expert : experts) last_use[expert] = ++uses;
        if (i % 5 != 4) continue;
        std::vector<RecordIndex> residents;
        for (uint32_t expert = 0; expert < 12; ++expert) {
          if (other.residency(expert) != Residency::miss) residents.push_back(expert);
        }
        std::sort(residents.begin(), residents.end(), [&](auto a, auto b) { return last_use[a] < last_use[b]; });
        other.adopt(other.policy().holding(residents));
      }
    }
  }
}

// --- replays

ReplayedPool one_pool(uint32_t experts, uint32_t slots) {
  ReplayedPool pool;
  pool.options.experts = experts;
  pool.options.slots[Residency::both_chunks] = slots;
  pool.options.tolerance = experts;
  pool.costs = kCosts;
  return pool;
}

ReplayOptions options_of(std::vector<PolicyCandidate> candidates, uint32_t requests_per_step = 1) {
  ReplayOptions options;
  options.candidates = std::move(candidates);
  options.requests_per_step = requests_per_step;
  return options;
}

// Working sets of four that follow each other: recency is all that helps.
std::vector<uint32_t> from_working_set(int step, std::mt19937& random) {
  const uint32_t first = static_cast<uint32_t>(step / 12) * 4 % 32;
  return {first + draw(random, 4)};
}

// Two that are always asked for, with a scan over all others between them: recency keeps the wrong ones.
std::vector<uint32_t> favourite_or_scan(int step) {
  if (step % 4 == 0) return {static_cast<uint32_t>(step / 4 % 2)};
  return {2 + static_cast<uint32_t>(step) * 7 % 30};
}

uint64_t misses(ReplayedPools& pools, std::vector<uint32_t> experts) {
  const std::vector<Residency> before = pools.access(0, experts).before;
  return static_cast<uint64_t>(std::count(before.begin(), before.end(), Residency::miss));
}

void test_lru_is_chosen_where_recency_helps() {
  ReplayedPools pools({one_pool(32, 4)}, options_of({{"lfu"}, {"zipmoe", 64}, {"lru"}, {"zipmoe", kForever}}));
  std::mt19937 random(2);
  for (int step = 0; step < 400; ++step) misses(pools, from_working_set(step, random));
  CHECK(pools.replay().chosen() == PolicyCandidate{"lru"});
  CHECK(pools.replay().changes() <= 2);
}

void test_counts_are_chosen_where_favourites_return() {
  for (const PolicyCandidate& counting : {PolicyCandidate{"lfu"}, PolicyCandidate{"zipmoe", 64}}) {
    ReplayedPools pools({one_pool(32, 4)}, options_of({{"lru"}, counting, {"fifo"}}));
    for (int step = 0; step < 300; ++step) misses(pools, favourite_or_scan(step));
    CHECK(pools.replay().chosen() == counting && pools.replay().changes() == 1);
  }
}

void test_the_choice_follows_the_workload_and_pays() {
  uint64_t adaptive = 0;
  std::vector<uint64_t> fixed(2);
  const std::vector<PolicyCandidate> candidates = {{"zipmoe", 64}, {"lru"}};
  ReplayedPools pools({one_pool(32, 4)}, options_of(candidates));
  std::vector<LayerPools> alone;
  for (const PolicyCandidate& candidate : candidates) {
    PoolOptions options = one_pool(32, 4).options;
    options.policy = candidate.policy;
    options.parameters.half_life_steps = candidate.half_life_steps;
    alone.emplace_back(options);
  }
  std::mt19937 random(9);
  std::vector<std::string> chosen;
  for (int phase = 0; phase < 4; ++phase) {
    for (int step = 0; step < 600; ++step) {
      const std::vector<uint32_t> wanted = phase % 2 == 0 ? from_working_set(step, random) : favourite_or_scan(step);
      adaptive += misses(pools, wanted);
      for (size_t i = 0; i < alone.size(); ++i) {
        const std::vector<Residency> before = alone[i].access(wanted).before;
        fixed[i] += static_cast<uint64_t>(std::count(before.begin(), before.end(), Residency::miss));
      }
    }
    chosen.push_back(pools.replay().chosen().policy);
  }
  CHECK(chosen == std::vector<std::string>({"lru", "zipmoe", "lru", "zipmoe"}));
  CHECK(pools.replay().changes() == 4);
  CHECK(adaptive < std::min(fixed[0], fixed[1]));
}

void test_a_change_moves_nobody() {
  std::mt19937 random(4);
  std::vector<ReplayedPool> layers(3, one_pool(32, 2));
  for (ReplayedPool& layer : layers) {
    layer.options.slots = {{1, 2, 2, 1}};
    layer.options.tolerance.reset();
  }
  PolicyReplay replay(layers, options_of({{"zipmoe", 64}, {"lru"}, {"lfuda"}}, 3));
  std::vector<LayerPools> pools;
  for (const ReplayedPool& layer : layers) pools.emplace_back(layer.options);
  int changes = 0;
  for (int step = 0; step < 1500; ++step) {
    const std::vector<uint32_t> wanted = step / 500 % 2 == 0 ? from_working_set(step, random) : favourite_or_scan(step);
    for (uint32_t layer = 0; layer < 3; ++layer) {
      if (replay.take_change()) {
        ++changes;
        for (uint32_t i = 0; i < 3; ++i) {
          const std::vector<bool> resident = residents(pools[i]);
          std::vector<Residency> before;
          for (uint32_t expert = 0; expert < 32; ++expert) before.push_back(pools[i].residency(expert));
          pools[i].adopt(replay.policy(i, resident));
          CHECK(pools[i].policy().name() == replay.chosen().policy);
          for (uint32_t expert = 0; expert < 32; ++expert) CHECK(pools[i].residency(expert) == before[expert]);
          const auto own = replay.policy(i, resident);
          const std::vector<RecordIndex> held = drained(*own);
          CHECK(held.size() == static_cast<size_t>(std::count(resident.begin(), resident.end(), true)));
        }
      }
      replay.request(layer, wanted);
      pools[layer].access(wanted);
    }
  }
  CHECK(changes >= 2 && static_cast<uint64_t>(changes) == replay.changes());
}

void test_one_candidate_is_that_policy() {
  std::mt19937 random(6);
  for (const std::string_view name : eviction_policy_names()) {
    ReplayedPool pool = one_pool(20, 3);
    pool.options.slots = {{1, 2, 0, 2}};
    pool.options.tolerance.reset();
    ReplayedPools pools({pool}, options_of({{std::string(name), 5}}));
    pool.options.policy = name;
    pool.options.parameters.half_life_steps = 5;
    LayerPools alone(pool.options);
    for (int i = 0; i < 200; ++i) {
      if (i == 120) CHECK(pools.resize(0, {{0, 1, 0, 2}}) == alone.resize({{0, 1, 0, 2}}));
      const std::vector<uint32_t> wanted = {draw(random, 10), 10 + draw(random, 10)};
      CHECK(pools.access(0, wanted).transitions == alone.access(wanted).transitions);
    }
    for (uint32_t expert = 0; expert < 20; ++expert) {
      CHECK(pools.replay().ghost(0, 0).residency(expert) == alone.residency(expert));
    }
  }
}

void test_costs_are_not_compared_while_everybody_fits() {
  ReplayedPool pool = one_pool(40, 8);
  pool.users = 8;  // the other numbers are never asked for
  PolicyReplay replay({pool}, options_of({{"lfu"}, {"lru"}}));
  for (int step = 0; step < 50; ++step) replay.request(0, std::vector<uint32_t>{static_cast<uint32_t>(step) % 8});
  CHECK(replay.mean_cost(0) == 0 && replay.changes() == 0);
  CHECK(replay.ghost(0, 0).occupied(Residency::both_chunks) == 8);  // as in the real pool
  replay.resize(0, {{0, 2, 0, 0}});                                 // the key-value cache grows
  std::mt19937 random(8);
  for (uint32_t step = 0; step < 300; ++step) {
    replay.request(0, std::vector<uint32_t>{(step / 20 * 2 + draw(random, 2)) % 8});
    if (step < 7) CHECK(replay.changes() == 0);  // too few steps with evidence, however many there were before
  }
  CHECK(replay.chosen() == PolicyCandidate{"lru"});
}

// Favourites of the time in which everybody fitted, then others, for long enough to learn that counting is better.
void test_what_was_asked_for_while_everybody_fitted_is_remembered() {
  ReplayedPool pool = one_pool(32, 32);
  for (const std::string_view counting : {"lfu", "zipmoe"}) {
    PolicyReplay replay({pool}, options_of({{"fifo"}, {std::string(counting), 1000}}));
    for (uint32_t step = 0; step < 3000; ++step) {
      replay.request(0, std::vector<uint32_t>{step % 3 == 0 ? step / 3 % 32 : 30 + step % 2});
    }
    replay.resize(0, {{0, 6, 0, 0}});
    for (int step = 0; replay.chosen() == PolicyCandidate{"fifo"}; ++step) {
      CHECK(step < 300);
      replay.request(0, favourite_or_scan(step));
    }
    CHECK(replay.take_change());
    std::vector<bool> resident(32);
    for (const uint32_t expert : {0, 1, 12, 13, 30, 31}) resident[expert] = true;
    const std::vector<RecordIndex> order = drained(*replay.policy(0, resident));
    CHECK(order.size() == 6);
    CHECK(std::set<RecordIndex>(order.begin() + 4, order.end()) == std::set<RecordIndex>({30, 31}));
  }
}

void test_steps_that_policies_do_not_decide_are_heard_and_are_no_evidence() {
  PolicyReplay replay({one_pool(32, 4), one_pool(32, 4)}, options_of({{"lru"}, {"lfu"}}, 2));
  PolicyReplay told({one_pool(32, 4), one_pool(32, 4)}, options_of({{"lru"}, {"lfu"}}, 2));
  for (int step = 0; step < 200; ++step) {
    for (uint32_t pool = 0; pool < 2; ++pool) {
      replay.request(pool, favourite_or_scan(step), pool == static_cast<uint32_t>(step % 2));  // one is enough
      told.request(pool, favourite_or_scan(step));
    }
  }
  CHECK(told.changes() == 1 && replay.changes() == 0);
  CHECK(replay.mean_cost(0) == 0 && replay.mean_cost(1) == 0);
  for (uint32_t candidate = 0; candidate < 2; ++candidate) {
    for (uint32_t expert = 0; expert < 32; ++expert) {
      CHECK(replay.ghost(candidate, 1).residency(expert) == told.ghost(candidate, 1).residency(expert));
    }
  }
  for (int step = 0; step < 100; ++step) {
    for (uint32_t pool = 0; pool < 2; ++pool) replay.request(pool, favourite_or_scan(step));
  }
  CHECK(replay.chosen() == PolicyCandidate{"lfu"});
}

void test_impossible_replays_are_refused() {
  EXPECT_ERROR(std::invalid_argument, PolicyReplay({}, options_of({{"lru"}})));
  EXPECT_ERROR(std::invalid_argument, PolicyReplay({one_pool(4, 2)}, options_of({})));
  EXPECT_ERROR(std::invalid_argument, PolicyReplay({one_pool(4, 2)}, options_of({{"oracle"}})));
  EXPECT_ERROR(std::invalid_argument, PolicyReplay({one_pool(4, 2)}, options_of({{"zipmoe", 0}})));
  EXPECT_ERROR(std::invalid_argument, PolicyReplay({one_pool(4, 2)}, options_of({{"lru"}}, 0)));
  PolicyReplay replay({one_pool(4, 2)}, options_of({{"lru"}, {"lfu"}}));
  EXPECT_ERROR(std::invalid_argument, replay.request(0, std::vector<uint32_t>{1, 1}));
  EXPECT_ERROR(std::out_of_range, replay.request(0, std::vector<uint32_t>{4}));
  EXPECT_ERROR(std::out_of_range, replay.request(1, std::vector<uint32_t>{0}));
  EXPECT_ERROR(std::invalid_argument, replay.policy(0, std::vector<bool>(3)));
  CHECK(replay.mean_cost(0) == 0);
  CHECK((PolicyCandidate{"zipmoe", 16}.description() == "zipmoe with a half-life of 16 steps"));
  CHECK(PolicyCandidate{"lru"}.description() == "lru");
}

}  // namespace
}  // namespace zipmoe

int main() {
  using namespace zipmoe;
  test_the_cheaper_candidate_takes_over_once();
  test_equals_never_take_turns();
  test_less_than_the_margin_is_no_reason();
  test_what_chance_explains_is_no_reason();
  test_old_steps_are_forgotten();
  test_impossible_choices_are_refused();
  test_a_policy_holds_what_it_is_given();
  test_lfu_and_decayed_counts_remember_what_others_evicted();
  test_adopting_the_own_memory_changes_nothing();
  test_lru_is_chosen_where_recency_helps();
  test_counts_are_chosen_where_favourites_return();
  test_the_choice_follows_the_workload_and_pays();
  test_a_change_moves_nobody();
  test_one_candidate_is_that_policy();
  test_costs_are_not_compared_while_everybody_fits();
  test_what_was_asked_for_while_everybody_fitted_is_remembered();
  test_steps_that_policies_do_not_decide_are_heard_and_are_no_evidence();
  test_impossible_replays_are_refused();
  std::puts("policy_replay_test: ok");
  return 0;
}
