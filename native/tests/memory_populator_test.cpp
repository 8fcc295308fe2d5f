// Memory that is brought in in the background: all of it, nothing that somebody uses, nothing that was given back.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "cache/arena.hpp"
#include "cache/expert_cache.hpp"
#include "cache/slot_pool.hpp"
#include "tests/forbidden_calls.hpp"
#include "tests/pool_requests.hpp"

namespace zipmoe {
namespace {

constexpr uint64_t kSmallPage = 4096;

// Small pages of the range that are in memory.
uint64_t present_pages(const Arena& arena, uint64_t offset, uint64_t length) {
  std::vector<unsigned char> present(length / kSmallPage);
  CHECK(::mincore(arena.data() + offset, length, present.data()) == 0);
  return static_cast<uint64_t>(std::ranges::count_if(present, [](unsigned char page) { return (page & 1) != 0; }));
}

void start(Arena& arena, uint32_t threads) {
  arena.prepare_populating(threads);
  arena.begin_populating();
}

bool holds(const uint8_t* data, uint64_t bytes, uint8_t value) {
  return std::all_of(data, data + bytes, [value](uint8_t byte) { return byte == value; });
}

void test_what_is_committed_is_brought_in() {
  constexpr uint64_t bytes = 8 * kHugePageBytes;
  Arena arena(bytes);
  arena.commit(0, kHugePageBytes - kReadableTailBytes);
  arena.prepare_populating(3);
  arena.commit(2 * kHugePageBytes, 3 * kHugePageBytes - kReadableTailBytes);
  CHECK(present_pages(arena, 0, bytes) == 0);
  arena.begin_populating();
  arena.begin_populating();
  arena.finish_populating();
  CHECK(present_pages(arena, 0, 2 * kHugePageBytes) == 0);  // committed before, and not at all
  CHECK(present_pages(arena, 2 * kHugePageBytes, 3 * kHugePageBytes) == 3 * kHugePageBytes / kSmallPage);
  CHECK(present_pages(arena, 5 * kHugePageBytes, 3 * kHugePageBytes) == 0);
}

void test_what_is_claimed_is_never_written_to() {
  constexpr uint64_t pages = 24;
  for (int round = 0; round < 20; ++round) {
    Arena arena(pages * kHugePageBytes);
    start(arena, 4);
    arena.commit(0, arena.bytes() - kReadableTailBytes);
    for (uint64_t page = 0; page < pages; page += 2) {  // while the threads are at it
      arena.claim(page * kHugePageBytes, kHugePageBytes);
      std::memset(arena.data() + page * kHugePageBytes, static_cast<int>(page + 1), kHugePageBytes);
    }
    arena.commit(0, arena.bytes() - kReadableTailBytes);  // as a pool that grows does
    arena.finish_populating();
    for (uint64_t page = 0; page < pages; page += 2) {
      CHECK(holds(arena.data() + page * kHugePageBytes, kHugePageBytes, static_cast<uint8_t>(page + 1)));
    }
    CHECK(present_pages(arena, 0, pages * kHugePageBytes) == pages * kHugePageBytes / kSmallPage);
  }
}

void test_what_is_given_back_stays_away_until_it_is_committed_again() {
  constexpr uint64_t pages = 16;
  for (int round = 0; round < 20; ++round) {
    Arena arena(pages * kHugePageBytes);
    start(arena, 4);
    arena.commit(0, arena.bytes() - kReadableTailBytes);
    arena.release(4 * kHugePageBytes, 8 * kHugePageBytes);  // while the threads are at it
    arena.finish_populating();
    CHECK(present_pages(arena, 4 * kHugePageBytes, 8 * kHugePageBytes) == 0);
    CHECK(present_pages(arena, 0, 4 * kHugePageBytes) == 4 * kHugePageBytes / kSmallPage);
    arena.commit(4 * kHugePageBytes, 2 * kHugePageBytes - kReadableTailBytes);
    arena.finish_populating();
    CHECK(present_pages(arena, 4 * kHugePageBytes, 2 * kHugePageBytes) == 2 * kHugePageBytes / kSmallPage);
    CHECK(present_pages(arena, 6 * kHugePageBytes, 6 * kHugePageBytes) == 0);
  }
}

void test_it_ends_with_work_left() {
  Arena arena(64 * kHugePageBytes);
  start(arena, 2);
  arena.commit(0, arena.bytes() - kReadableTailBytes);
  arena.stop_populating();
  arena.claim(0, arena.bytes());  // without threads there is nothing to claim
  arena.release(0, arena.bytes());
  CHECK(present_pages(arena, 0, arena.bytes()) == 0);
}

// Slots that overlap in huge pages, filled while the threads are at it.
template <typename Fill, typename Data>
void check_slots(Arena& arena, uint64_t slot_bytes, uint32_t slots, const Fill& fill, const Data& data) {
  for (uint32_t slot = 0; slot < slots; ++slot) std::memset(fill(slot), static_cast<int>(slot + 1), slot_bytes);
  arena.finish_populating();
  for (uint32_t slot = 0; slot < slots; ++slot) CHECK(holds(data(slot), slot_bytes, static_cast<uint8_t>(slot + 1)));
}

void test_slots_are_claimed() {
  constexpr uint64_t slot_bytes = 5 * (kHugePageBytes / 4);
  constexpr uint32_t slots = 30;
  for (int round = 0; round < 10; ++round) {
    Arena arena(SlotPool::reserved_bytes(slot_bytes, slots));
    start(arena, 4);
    SlotPool pool(arena, 0, slot_bytes, slots);
    pool.grow(slots / 2);
    pool.grow(slots);
    std::vector<Slot> taken;
    check_slots(
        arena, slot_bytes, slots, [&](uint32_t) { return taken.emplace_back(*pool.acquire()).data(); },
        [&](uint32_t slot) { return taken[slot].data(); });
  }
}

void test_slots_of_the_single_pool_are_claimed_also_when_it_shrinks() {
  constexpr uint64_t slot_bytes = 5 * (kHugePageBytes / 4);
  constexpr uint32_t slots = 30;
  const std::vector<SizeClass> classes = {{.slot_bytes = slot_bytes, .slot_limit = slots, .slots = slots}};
  for (int round = 0; round < 10; ++round) {
    Arena arena(ExpertCache::reserved_bytes(classes));
    start(arena, 4);
    ExpertCache cache(arena, 0, classes, std::vector<uint32_t>(slots, 0), "lru");
    const auto fill = [&](RecordIndex record) { return cache.acquire(record); };
    check_slots(arena, slot_bytes, slots, fill, [&](RecordIndex record) {
      cache.admit(record);
      cache.unpin(record);
      return cache.data(record);
    });
    for (RecordIndex record = 0; record < 20; ++record) cache.evict(record);
    cache.resize(0, 10);  // the others move to slots that were given up
    arena.finish_populating();
    for (RecordIndex record = 20; record < slots; ++record) {
      CHECK(holds(cache.data(record), slot_bytes, static_cast<uint8_t>(record + 1)));
    }
  }
}

void forbid_new_threads() {
  forbid_call(SYS_clone3, EAGAIN);
  forbid_call(SYS_clone, EAGAIN);
}

void test_a_limit_of_threads_does_not_end_a_load() {
  const PackedModel model("fx3", kExperts, 1);
  run_in_child([&] {
    EngineOptions options = model.options(4);
    options.populate_threads = 3;
    Engine engine(model.table(), options);
    forbid_new_threads();
    load_dense(engine);
    run(engine, model, {0, 5, 7, 3, 2, 1});
    engine.arena()->finish_populating();  // nobody will
    engine.resize_pool(0, 2);
    run(engine, model, {6, 0});
  });
}

void test_a_forked_child_gives_its_copy_up_without_waiting() {
  constexpr uint64_t pages = 64;
  auto arena = std::make_unique<Arena>(pages * kHugePageBytes);
  start(*arena, 2);
  arena->commit(0, arena->bytes() - kReadableTailBytes);
  run_in_child([&] {
    ::alarm(60);  // instead of waiting for ever
    arena.reset();
  });
  arena->claim(0, kHugePageBytes);
  std::memset(arena->data(), 1, kHugePageBytes);
  arena->finish_populating();
  CHECK(holds(arena->data(), kHugePageBytes, 1));
}

void test_pools_are_filled_while_their_memory_is_brought_in() {
  for (const std::string& codec : codecs_to_test()) {
    const PackedModel model(codec, kExperts, separable(codec) ? 2 : 1);
    const PoolSlots slots = separable(codec) ? PoolSlots{{2, 3, 2, 2}} : PoolSlots{{2, 3, 0, 0}};
    const PoolSlots fewer = separable(codec) ? PoolSlots{{1, 2, 1, 1}} : PoolSlots{{1, 1, 0, 0}};
    for (uint32_t round = 0; round < 6; ++round) {
      EngineOptions options = model.pool_options(slots, 2, 2, round % 2 * 2);
      options.populate_threads = 3;
      Engine engine(model.table(), options);
      load_dense(engine);  // from here on the threads are at it
      std::mt19937 generator(round);
      for (int request = 0; request < 12; ++request) {
        if (request == 4) engine.resize_pools({&fewer, 1});
        if (request == 8) engine.resize_pools({&slots, 1});
        run(engine, model, choose(generator, 1 + generator() % 5));
      }
      engine.arena()->finish_populating();
      run(engine, model, choose(generator, kExperts));  // what is in memory is intact
    }
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_a_limit_of_threads_does_not_end_a_load();  // first: no thread may run when a process forks
  zipmoe::test_what_is_committed_is_brought_in();
  zipmoe::test_what_is_claimed_is_never_written_to();
  zipmoe::test_what_is_given_back_stays_away_until_it_is_committed_again();
  zipmoe::test_it_ends_with_work_left();
  zipmoe::test_slots_are_claimed();
  zipmoe::test_slots_of_the_single_pool_are_claimed_also_when_it_shrinks();
  zipmoe::test_pools_are_filled_while_their_memory_is_brought_in();
  zipmoe::test_a_forked_child_gives_its_copy_up_without_waiting();
  std::puts("memory_populator_test: ok");
  return 0;
}
