// Requests on the pools F, C, S and E: what is read for whom, who goes where, and that no order of completions changes
// a weight or a residency. Runs under the address, undefined and thread sanitizers.
#include <utility>

#include "tests/pool_requests.hpp"

using namespace std::chrono_literals;

namespace zipmoe {
namespace {

struct PoolSet {
  const char* name;
  PoolSlots slots;
  bool separable_only;
};
constexpr PoolSet kPoolSets[] = {
    {"C", {{0, 3, 0, 0}}, false}, {"F", {{2, 0, 0, 0}}, false},   {"FC", {{1, 2, 0, 0}}, false},
    {"S", {{0, 0, 3, 0}}, true},  {"E", {{0, 0, 0, 3}}, true},    {"SE", {{0, 0, 2, 2}}, true},
    {"CS", {{0, 2, 2, 0}}, true}, {"FCSE", {{1, 1, 2, 2}}, true}, {"none", {{0, 0, 0, 0}}, false},
};

// Changes the policy as soon as another one would have read less.
ReplayOptions eager_replay() {
  ReplayOptions options;
  options.choice = {.window_steps = 4, .least_steps = 2, .margin = 0, .standard_errors = 0};
  return options;
}

void test_weights_and_residencies_do_not_depend_on_the_order_of_completions() {
  uint32_t seed = 0;
  for (const std::string& codec : codecs_to_test()) {
    const PackedModel model(codec, kExperts, separable(codec) ? 3 : 1);
    for (const PoolSet& pools : kPoolSets) {
      if (pools.separable_only && !separable(codec)) continue;
      for (const uint32_t staging : {1U, 3U}) {
        EngineOptions options = model.pool_options(pools.slots, staging, 1 + seed % 3, seed % 4);
        options.eviction_policy = eviction_policy_names()[seed % eviction_policy_names().size()];
        // Where F has slots the choice depends on rates that were measured.
        if (seed % 2 == 0 && pools.slots[Residency::full] == 0) options.policy_replay = eager_replay();
        ++seed;
        Engine shuffled(model.table(), options, shuffling_reader(model, options, seed));
        Engine orderly(model.table(), options);
        load_dense(shuffled);
        load_dense(orderly);
        std::mt19937 generator(seed);
        for (int round = 0; round < 12; ++round) {
          const std::vector<RecordIndex> wanted = choose(generator, round == 5 ? kExperts : 1 + generator() % 5);
          const HandOutOrder order = generator() % 2 == 0 ? HandOutOrder::ascending : HandOutOrder::as_available;
          run(shuffled, model, wanted, order);
          run(orderly, model, wanted, order);
          CHECK(residencies(shuffled) == residencies(orderly));
          CHECK(shuffled.policy() == orderly.policy());
        }
      }
    }
  }
}

void test_requests_left_early_and_resized_pools() {
  uint32_t seed = 100;
  for (const PoolSet& pools : kPoolSets) {
    for (const std::string& codec : {std::string("fx3"), codecs_to_test().back()}) {
      if (pools.separable_only && !separable(codec)) continue;
      const PackedModel model(codec, kExperts, separable(codec) ? 2 : 1);
      EngineOptions options = model.pool_options(pools.slots, 2, 2, seed % 3);
      options.eviction_policy = eviction_policy_names()[seed % eviction_policy_names().size()];
      if (seed % 2 == 0) options.policy_replay = eager_replay();
      Engine engine(model.table(), options, shuffling_reader(model, options, ++seed));
      load_dense(engine);
      std::mt19937 generator(seed);
      for (int round = 0; round < 40; ++round) {
        const std::vector<RecordIndex> wanted = choose(generator, 1 + generator() % kExperts);
        const HandOutOrder order = generator() % 2 == 0 ? HandOutOrder::ascending : HandOutOrder::as_available;
        run(engine, model, wanted, order, generator() % 3 == 0 ? generator() % wanted.size() : SIZE_MAX);
        if (round % 8 == 7) {
          PoolSlots smaller = pools.slots;
          for (uint32_t& experts : smaller.experts) experts = experts == 0 ? 0 : generator() % (experts + 1);
          engine.resize_pools(std::vector{smaller});
          check_occupancy(engine);
        }
      }
      engine.resize_pools(std::vector{pools.slots});
    }
  }
}

void test_what_is_in_memory_decides_what_is_read() {
  for (const std::string& codec : codecs_to_test()) {
    if (!separable(codec)) continue;
    const PackedModel model(codec, kExperts, 2);
    const RecordTable table = model.table();
    const uint64_t exponent = table.part(0, 0).length;
    const uint64_t sign_mantissa = table.part(0, 1).length;
    const auto read_for_second_use = [&](const PoolSlots& slots) {
      Engine engine(model.table(), model.pool_options(slots, 1));
      load_dense(engine);
      const EngineCounters start = engine.counters();
      run(engine, model, {0});
      const EngineCounters first = engine.counters();
      CHECK(first.part_read_bytes[0] - start.part_read_bytes[0] == exponent);
      CHECK(first.part_read_bytes[1] - start.part_read_bytes[1] == sign_mantissa);
      CHECK(first.read.reads - start.read.reads == 1);  // a whole record is one read, wherever its parts go
      CHECK(first.read.bytes - start.read.bytes == table[0].length);
      run(engine, model, {0});
      const EngineCounters second = engine.counters();
      return std::tuple(second.read.reads - first.read.reads, second.part_read_bytes[0] - first.part_read_bytes[0],
                        second.part_read_bytes[1] - first.part_read_bytes[1]);
    };
    const std::tuple<uint64_t, uint64_t, uint64_t> nothing = {0, 0, 0};
    CHECK(read_for_second_use({{1, 0, 0, 0}}) == nothing);
    CHECK(read_for_second_use({{0, 1, 0, 0}}) == nothing);
    CHECK(read_for_second_use({{0, 0, 1, 0}}) == std::tuple(1, exponent, 0));
    CHECK(read_for_second_use({{0, 0, 0, 1}}) == std::tuple(1, 0, sign_mantissa));
    CHECK(read_for_second_use({{0, 0, 0, 0}}) == std::tuple(1, exponent, sign_mantissa));
  }
}

void test_parts_in_memory_are_never_read_again_while_experts_move() {
  for (const std::string& codec : codecs_to_test()) {
    if (!separable(codec)) continue;
    const PackedModel model(codec, kExperts, 2);
    const RecordTable table = model.table();
    EngineOptions options = model.pool_options({{1, 1, 1, 1}}, 1);
    options.pools->tolerance = kExperts;
    Engine engine(model.table(), options);
    load_dense(engine);
    std::mt19937 generator(3);
    for (int round = 0; round < 200; ++round) {
      const RecordIndex record = generator() % 6;
      const Residency before = engine.residency(record);
      const EngineCounters start = engine.counters();
      run(engine, model, {record});
      const EngineCounters end = engine.counters();
      const RemainingWork work = remaining_work(before, ChunkLayout::separable(2));
      CHECK(end.part_read_bytes[0] - start.part_read_bytes[0] ==
            (work.read_exponent ? table.part(record, 0).length : 0));
      CHECK(end.part_read_bytes[1] - start.part_read_bytes[1] ==
            (work.read_sign_mantissa ? table.part(record, 1).length : 0));
      CHECK(end.by_residency[static_cast<size_t>(before)] == start.by_residency[static_cast<size_t>(before)] + 1);
    }
    for (const uint64_t count : engine.counters().by_residency) CHECK(count > 0);
    CHECK(engine.counters().promotions > 0 && engine.counters().demotions > 0);
  }
}

void test_damage_in_one_part_is_named_and_the_engine_stays_usable() {
  for (const std::string& codec : codecs_to_test()) {
    if (!separable(codec)) continue;
    for (const uint32_t part : {0U, 1U}) {
      const PackedModel model(codec, kExperts, 2);
      Engine engine(model.table(),
                    model.pool_options(part == 0 ? PoolSlots{{0, 0, 2, 0}} : PoolSlots{{0, 0, 0, 2}}, 1));
      load_dense(engine);
      run(engine, model, {3});
      const Residency held = engine.residency(3);
      CHECK(held == (part == 0 ? Residency::sign_mantissa : Residency::exponent));
      const uint64_t damaged = model.record(3).offset + model.record(3).extents[part].offset + 10;
      model.flip_byte(damaged);
      for (const HandOutOrder order : {HandOutOrder::as_available, HandOutOrder::ascending}) {
        const auto error = EXPECT_ERROR(RecordError, run(engine, model, {2, 3, 4}, order));
        engine.end_request();
        check_occupancy(engine);
        CHECK(error.record() == 3 && error.fault() == RecordFault::checksum_mismatch);
        CHECK(std::string(error.what()).find(part == 0 ? "(extent E)" : "(extent SM)") != std::string::npos);
        CHECK(run(engine, model, {0, 1, 2, 4, 5}, order).size() == 5);
      }
      model.flip_byte(damaged);
      CHECK(run(engine, model, {2, 3, 4}).size() == 3);
    }
  }
}

void test_decoded_experts_are_hits_that_decode_nothing() {
  for (const std::string& codec : codecs_to_test()) {
    const PackedModel model(codec, kExperts, separable(codec) ? 2 : 1);
    Engine engine(model.table(), model.pool_options({{2, 0, 0, 0}}, 1));
    load_dense(engine);
    run(engine, model, {1, 2});
    const EngineCounters start = engine.counters();
    run(engine, model, {2, 1});
    const EngineCounters end = engine.counters();
    CHECK(end.decoded_bytes == start.decoded_bytes && end.read.reads == start.read.reads);
    CHECK(end.hits - start.hits == 2 && end.by_residency[0] == 2);
    std::vector<uint16_t> row(64);
    EXPECT_ERROR(std::logic_error, engine.decode(1, 0, 0, 1, row));  // not handed out
    EXPECT_ERROR(std::logic_error, engine.decoded_offset(1, 0));
  }
}

void test_misuse_of_pools_is_refused() {
  const PackedModel model("fx3", kExperts, 1);
  EXPECT_ERROR(std::invalid_argument, Engine(model.table(), model.pool_options({{0, 1, 1, 0}}, 1)));
  EXPECT_ERROR(std::invalid_argument, Engine(model.table(), model.pool_options({{0, 1, 0, 0}}, 0)));
  EngineOptions options = model.pool_options({{1, 1, 0, 0}}, 1);
  options.pools->groups[0].experts.pop_back();
  EXPECT_ERROR(std::invalid_argument, Engine(model.table(), options));
  options = model.pool_options({{1, 1, 0, 0}}, 1);
  options.pools->classes[0].part_bytes[0] -= 4096;
  EXPECT_ERROR(std::invalid_argument, Engine(model.table(), options));
  options = model.pool_options({{1, 1, 0, 0}}, 1);
  options.pools->classes[0].full_bytes -= 4096;
  EXPECT_ERROR(std::invalid_argument, Engine(model.table(), options));
  Engine engine(model.table(), model.pool_options({{1, 1, 0, 0}}, 1));
  load_dense(engine);
  EXPECT_ERROR(std::logic_error, engine.resize_pool(0, 1));
  EXPECT_ERROR(std::invalid_argument, engine.resize_pools(std::vector{PoolSlots{{2, 1, 0, 0}}}));
  EXPECT_ERROR(std::invalid_argument, engine.resize_pools({}));
  EXPECT_ERROR(std::invalid_argument, engine.begin_request({0, 1}, HandOutOrder::ascending, {1}));
  run(engine, model, {});
  engine.begin_request({0}, HandOutOrder::ascending, {7});
  EXPECT_ERROR(std::logic_error, engine.resize_pools(std::vector{PoolSlots{{0, 0, 0, 0}}}));
  engine.end_request();
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_what_is_in_memory_decides_what_is_read();
  zipmoe::test_parts_in_memory_are_never_read_again_while_experts_move();
  zipmoe::test_damage_in_one_part_is_named_and_the_engine_stays_usable();
  zipmoe::test_decoded_experts_are_hits_that_decode_nothing();
  zipmoe::test_misuse_of_pools_is_refused();
  zipmoe::test_requests_left_early_and_resized_pools();
  zipmoe::test_weights_and_residencies_do_not_depend_on_the_order_of_completions();
  std::puts("pool_request_test: ok");
  return 0;
}
