// Cache and worker threads without Python. Runs under the address, undefined and thread sanitizers.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "cache/arena.hpp"
#include "cache/expert_cache.hpp"
#include "cache/lru.hpp"
#include "runtime/worker_pool.hpp"
#include "tests/engine_test_support.hpp"

namespace zipmoe {
namespace {

// --- cache

void test_lru_evicts_the_longest_unused() {
  LeastRecentlyUsed policy(8);
  const auto any = [](RecordIndex) { return true; };
  CHECK(!policy.victim(any));
  for (const RecordIndex record : {3U, 1U, 5U}) policy.admitted(record);
  CHECK(policy.victim(any) == 3U);
  policy.used(3);
  CHECK(policy.victim(any) == 1U);
  CHECK(policy.victim([](RecordIndex record) { return record != 1; }) == 5U);
  policy.removed(1);
  CHECK(policy.victim(any) == 5U);
  policy.removed(5);
  policy.removed(3);
  CHECK(!policy.victim(any));
  EXPECT_ERROR(std::invalid_argument, make_eviction_policy("crystal ball", 1));
}

void fill(ExpertCache& cache, RecordIndex record) {
  uint8_t* slot = cache.acquire(record);
  CHECK(slot != nullptr);
  CHECK(reinterpret_cast<uintptr_t>(slot) % 4096 == 0);
  std::memset(slot, static_cast<int>(record + 1), cache.classes()[cache.size_class(record)].slot_bytes);
  cache.admit(record);
  cache.unpin(record);
}

void check_content(const ExpertCache& cache, RecordIndex record) {
  const uint8_t* data = cache.data(record);
  const uint64_t bytes = cache.classes()[cache.size_class(record)].slot_bytes;
  CHECK(std::all_of(data, data + bytes, [&](uint8_t byte) { return byte == record + 1; }));
}

void test_cache_slots_pins_and_size_classes() {
  const std::vector<SizeClass> classes = {{.slot_bytes = 3 * 4096, .slot_limit = 4, .slots = 2},
                                          {.slot_bytes = 4096, .slot_limit = 2, .slots = 1}};
  Arena arena(ExpertCache::reserved_bytes(classes));
  ExpertCache cache(arena, 0, classes, {0, 0, 0, 0, 1, 1, ExpertCache::kNotCached}, "lru");
  CHECK(cache.slot_count() == 3 && cache.pool_bytes() == 7 * 4096);
  fill(cache, 0);
  fill(cache, 1);
  fill(cache, 4);
  cache.pin(0);
  fill(cache, 2);  // 1 goes, although 0 is older
  CHECK(cache.resident(0) && !cache.resident(1) && cache.resident(2) && cache.resident(4));
  cache.pin(2);
  CHECK(cache.acquire(3) == nullptr);
  cache.unpin(2);
  uint8_t* slot = cache.acquire(3);
  CHECK(slot != nullptr && !cache.resident(2) && !cache.resident(3));
  cache.discard(3);
  CHECK(cache.acquire(1) == slot);
  EXPECT_ERROR(std::logic_error, cache.resize(0, 1));
  cache.admit(1);
  EXPECT_ERROR(std::logic_error, cache.evict(1));
  EXPECT_ERROR(std::out_of_range, cache.acquire(6));
  check_content(cache, 0);
  check_content(cache, 4);
  CHECK(cache.evictions() == 2 && cache.resident_records() == 3);
}

void test_cache_shrinks_to_the_most_recent_and_grows_again() {
  const std::vector<SizeClass> classes = {{.slot_bytes = uint64_t{1} << 20, .slot_limit = 12, .slots = 10}};
  Arena arena(ExpertCache::reserved_bytes(classes));
  ExpertCache cache(arena, 0, classes, std::vector<uint32_t>(12, 0), "lru");
  for (RecordIndex record = 0; record < 10; ++record) fill(cache, record);
  cache.used(0);
  cache.resize(0, 3);
  CHECK(cache.slot_count() == 3 && cache.resident_records() == 3);
  for (const RecordIndex record : {8U, 9U, 0U}) check_content(cache, record);
  cache.resize(0, 12);
  for (RecordIndex record = 1; record < 12; ++record) {
    if (!cache.resident(record)) fill(cache, record);
  }
  CHECK(cache.resident_records() == 12);
  for (RecordIndex record = 0; record < 12; ++record) check_content(cache, record);
  EXPECT_ERROR(std::invalid_argument, cache.resize(0, 13));
}

// Six records of two layers in four slots, oldest first: `resident`.
ExpertCache cache_of_two_layers(Arena& arena, const std::vector<SizeClass>& classes,
                                const std::vector<RecordIndex>& resident) {
  ExpertCache cache(arena, 0, classes, {0, 0, 0, 0, 0, 0, ExpertCache::kNotCached}, "lru", {.requests_per_step = 2});
  for (const RecordIndex record : resident) fill(cache, record);
  return cache;
}

void test_a_sweep_spares_what_it_will_ask_for_in_later_layers() {
  const std::vector<SizeClass> classes = {{.slot_bytes = 4096, .slot_limit = 6, .slots = 4}};
  Arena arena(ExpertCache::reserved_bytes(classes));
  {
    ExpertCache cache = cache_of_two_layers(arena, classes, {3, 4, 0, 1});
    cache.requested(std::vector<RecordIndex>{1, 2});  // most of the layer: 3 and 4 are older, but will be asked for
    CHECK(cache.acquire(2, Spared::awaited) != nullptr);
    CHECK(!cache.resident(0) && cache.resident(3) && cache.resident(4));
    cache.pin(1);
    CHECK(cache.acquire(0, Spared::awaited) == nullptr);  // nothing else is left
    CHECK(cache.acquire(0) != nullptr);
    CHECK(!cache.resident(3) && cache.resident(4));
  }
  {
    ExpertCache cache = cache_of_two_layers(arena, classes, {3, 4, 0, 1});
    cache.requested(std::vector<RecordIndex>{2});  // a third of it, as a decoding step does
    CHECK(cache.acquire(2, Spared::awaited) != nullptr);
    CHECK(!cache.resident(3) && cache.resident(0));
  }
  {
    ExpertCache cache = cache_of_two_layers(arena, classes, {3, 0, 4, 1});
    cache.requested(std::vector<RecordIndex>{0, 1});
    cache.requested(std::vector<RecordIndex>{3, 4, 5});  // the last layer: nothing is awaited
    cache.pin(3);
    CHECK(cache.acquire(5, Spared::awaited) != nullptr);
    CHECK(cache.resident(0) && !cache.resident(4));  // both layers are as full; the next pass asks for 0 first
    cache.requested({});
    CHECK(cache.acquire(2, Spared::awaited) != nullptr);
    CHECK(!cache.resident(0));
  }
}

// --- workers

void test_worker_pool_runs_each_task_once_and_survives_failures() {
  for (const uint32_t threads : {1U, 2U, 5U}) {
    WorkerPool pool(threads);
    CHECK(pool.threads() == threads);
    for (int round = 0; round < 50; ++round) {
      std::vector<std::atomic<int>> done(37);
      pool.run(37, [&](uint32_t task) { done[task].fetch_add(1); });
      for (const std::atomic<int>& count : done) CHECK(count.load() == 1);
      const auto error = EXPECT_ERROR(std::runtime_error, pool.run(20, [](uint32_t task) {
        if (task == 7) throw std::runtime_error("seven");
      }));
      CHECK(std::string(error.what()) == "seven");
    }
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_lru_evicts_the_longest_unused();
  zipmoe::test_cache_slots_pins_and_size_classes();
  zipmoe::test_cache_shrinks_to_the_most_recent_and_grows_again();
  zipmoe::test_a_sweep_spares_what_it_will_ask_for_in_later_layers();
  zipmoe::test_worker_pool_runs_each_task_once_and_survives_failures();
  std::puts("engine_parts_test: ok");
  return 0;
}
