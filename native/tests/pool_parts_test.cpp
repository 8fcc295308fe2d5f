// Slots, memory and dispatch of the pools F, C, S and E without any reading.
#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "cache/pool_memory.hpp"
#include "tests/engine_test_support.hpp"

namespace zipmoe {
namespace {

constexpr Residency kFull = Residency::full;
constexpr Residency kBoth = Residency::both_chunks;
constexpr Residency kSignMantissa = Residency::sign_mantissa;
constexpr Residency kExponent = Residency::exponent;
constexpr Residency kMiss = Residency::miss;

PoolSlots pool_slots(uint32_t full, uint32_t both, uint32_t sign_mantissa, uint32_t exponent) {
  return {{full, both, sign_mantissa, exponent}};
}

// --- slots

void test_slots_go_back_when_their_owner_ends() {
  Arena arena(uint64_t{1} << 24);
  SlotPool pool(arena, kHugePageBytes, 8192, 4);
  pool.grow(3);
  std::optional<Slot> first = pool.acquire();
  std::optional<Slot> second = pool.acquire();
  CHECK(first && second && second->data() == first->data() + 8192);
  CHECK(pool.free_slots() == 1);
  Slot moved = std::move(*first);
  first.reset();
  CHECK(pool.free_slots() == 1);
  {
    const std::optional<Slot> third = pool.acquire();
    CHECK(third && !pool.acquire());
  }
  CHECK(pool.free_slots() == 1);
  second = std::move(moved);  // the old slot of `second` is free once `moved` has ended
  EXPECT_ERROR(std::invalid_argument, pool.grow(5));
  EXPECT_ERROR(std::invalid_argument, SlotPool(arena, 0, 100, 1));
}

void test_a_pool_shrinks_below_slots_in_use() {
  Arena arena(uint64_t{1} << 24);
  SlotPool pool(arena, 0, 4096, 10);
  pool.grow(10);
  std::vector<Slot> slots;
  for (int i = 0; i < 10; ++i) {
    slots.push_back(std::move(*pool.acquire()));
    std::memset(slots.back().data(), i, 4096);
  }
  std::vector<Slot> kept;
  for (const size_t i : {1U, 6U, 9U}) kept.push_back(std::move(slots[i]));
  slots.clear();
  EXPECT_ERROR(std::logic_error, pool.shrink(3));
  for (Slot& slot : kept) pool.move_below(slot, 3);
  pool.shrink(3);
  CHECK(pool.slots() == 3 && pool.free_slots() == 0);
  for (const auto& [slot, value] : {std::pair{0U, 1}, {1U, 6}, {2U, 9}}) {
    const uint8_t* bytes = kept[slot].data();
    CHECK(bytes < arena.data() + 3 * 4096 && std::all_of(bytes, bytes + 4096, [&](uint8_t b) { return b == value; }));
  }
  pool.grow(10);
  CHECK(pool.free_slots() == 7);
}

// --- memory

class Memory {
 public:
  Memory(const PoolSlots& slots, uint32_t staging, bool separable = true)
      : classes{{.full_bytes = 8192, .part_bytes = {4096, separable ? 8192U : 0U}, .staging = staging}},
        groups{{.pool_class = 0, .experts = {0, 1, 2, 3, 4, 5, 6, 7}, .slots = slots}},
        arena(PoolMemory::reserved_bytes(classes, groups)),
        memory(arena, 0, classes, groups, 9) {}

  void put(RecordIndex record, Residency to) {
    if (to == kFull) {
      memory.settle_full(record, *memory.acquire_full(record));
      return;
    }
    StagedParts staged;
    CHECK(memory.stage_missing(record, staged));
    memory.settle(record, std::move(staged), to);
  }
  void mark(RecordIndex record, uint8_t value) {
    const auto places = memory.places(record, {});
    if (places[0] != nullptr) std::memset(places[0], value, 4096);
    if (places[1] != nullptr) std::memset(places[1], value, 8192);
  }
  bool marked(RecordIndex record, uint8_t value) const {
    const auto places = memory.places(record, {});
    const auto all = [value](const uint8_t* bytes, size_t count) {
      return bytes == nullptr || std::all_of(bytes, bytes + count, [value](uint8_t b) { return b == value; });
    };
    return all(places[0], 4096) && all(places[1], 8192);
  }

  std::vector<PoolClass> classes;
  std::vector<PoolGroup> groups;
  Arena arena;
  PoolMemory memory;
};

void test_moving_between_pools_keeps_or_drops_slots_and_never_copies() {
  Memory test(pool_slots(1, 2, 2, 2), 1);
  PoolMemory& memory = test.memory;
  test.put(3, kBoth);
  const auto both = memory.places(3, {});
  CHECK(memory.residency(3) == kBoth && both[0] != nullptr && both[1] != nullptr);
  memory.settle(3, {}, kSignMantissa);
  CHECK(memory.residency(3) == kSignMantissa);
  CHECK(memory.places(3, {})[0] == nullptr && memory.places(3, {})[1] == both[1]);
  EXPECT_ERROR(std::logic_error, memory.settle(3, {}, kBoth));
  EXPECT_ERROR(std::logic_error, memory.settle(3, {}, kExponent));
  CHECK(memory.residency(3) == kSignMantissa);  // nothing was lost by the refusals
  StagedParts staged;
  CHECK(memory.stage_missing(3, staged) && staged[0] && !staged[1]);
  uint8_t* exponent = staged[0]->data();
  memory.settle(3, std::move(staged), kBoth);
  CHECK(memory.places(3, {})[0] == exponent && memory.places(3, {})[1] == both[1]);
  memory.settle(3, {}, kExponent);
  CHECK(memory.places(3, {})[0] == exponent && memory.places(3, {})[1] == nullptr);
  test.put(3, kFull);
  CHECK(memory.full(3) != nullptr && memory.places(3, {})[0] == nullptr);
  CHECK(!memory.acquire_full(4));
  EXPECT_ERROR(std::logic_error, memory.settle(4, {}, kFull));
  EXPECT_ERROR(std::logic_error, memory.settle(3, {}, kBoth));
  memory.settle(3, {}, kMiss);
  EXPECT_ERROR(std::logic_error, memory.full(3));
  CHECK(memory.dropped() == 1 && memory.demotions() == 2 && memory.promotions() == 2);
  EXPECT_ERROR(std::out_of_range, memory.residency(8));  // not an expert
}

void test_every_slot_can_be_used_in_any_mixture() {
  std::mt19937 generator(5);
  Memory test(pool_slots(2, 2, 1, 2), 1);
  PoolMemory& memory = test.memory;
  const std::array<Residency, 5> residencies = {kFull, kBoth, kSignMantissa, kExponent, kMiss};
  for (int step = 0; step < 3000; ++step) {
    const auto record = static_cast<RecordIndex>(generator() % 8);
    const Residency to = residencies[generator() % 5];
    const Residency from = memory.residency(record);
    const PoolSlots& held = memory.held(0);
    if (to != kMiss && to != from && held[to] >= test.groups[0].slots[to]) continue;
    if (from == kFull && to != kFull) memory.settle(record, {}, kMiss);
    if (to != memory.residency(record)) test.put(record, to);  // one expert in staging always fits
    CHECK(memory.residency(record) == to);
    test.mark(record, static_cast<uint8_t>(record));
    for (RecordIndex other = 0; other < 8; ++other) {
      CHECK(memory.residency(other) == kMiss || test.marked(other, static_cast<uint8_t>(other)));
    }
  }
}

void test_shrinking_keeps_what_is_held() {
  Memory test(pool_slots(2, 3, 2, 2), 2);
  PoolMemory& memory = test.memory;
  for (RecordIndex record = 0; record < 3; ++record) test.put(record, kBoth);
  for (RecordIndex record = 3; record < 5; ++record) test.put(record, kSignMantissa);
  for (RecordIndex record = 5; record < 7; ++record) test.put(record, kExponent);
  test.put(7, kFull);
  for (RecordIndex record = 0; record < 7; ++record) test.mark(record, static_cast<uint8_t>(record + 1));
  const uint64_t before = memory.slot_bytes();
  EXPECT_ERROR(std::logic_error, memory.resize(std::vector{pool_slots(1, 1, 1, 1)}));
  for (const RecordIndex record : {0U, 1U, 3U, 5U}) memory.settle(record, {}, kMiss);
  memory.resize(std::vector{pool_slots(1, 1, 1, 1)});
  CHECK(memory.slot_bytes() == before - 8192 - 3 * 4096 - 3 * 8192);
  for (const RecordIndex record : {2U, 4U, 6U}) CHECK(test.marked(record, static_cast<uint8_t>(record + 1)));
  CHECK(memory.residency(7) == kFull);
  memory.resize(std::vector{pool_slots(2, 3, 2, 2)});
  CHECK(memory.slot_bytes() == before);
  EXPECT_ERROR(std::invalid_argument, memory.resize({}));
}

void test_codecs_with_one_part_have_no_pools_for_chunks() {
  Memory test(pool_slots(1, 2, 0, 0), 1, false);
  test.put(0, kBoth);
  CHECK(test.memory.residency(0) == kBoth && test.memory.places(0, {})[1] == nullptr);
  EXPECT_ERROR(std::logic_error, test.memory.settle(0, {}, kSignMantissa));
  EXPECT_ERROR(std::invalid_argument, Memory(pool_slots(0, 1, 1, 0), 1, false));
  EXPECT_ERROR(std::invalid_argument, Memory(pool_slots(0, 1, 0, 0), 0));
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_slots_go_back_when_their_owner_ends();
  zipmoe::test_a_pool_shrinks_below_slots_in_use();
  zipmoe::test_moving_between_pools_keeps_or_drops_slots_and_never_copies();
  zipmoe::test_every_slot_can_be_used_in_any_mixture();
  zipmoe::test_shrinking_keeps_what_is_held();
  zipmoe::test_codecs_with_one_part_have_no_pools_for_chunks();
  std::puts("pool_parts_test: ok");
  return 0;
}
