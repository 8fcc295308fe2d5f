// Requests on the pools F, C, S and E: what is read for whom, who goes where, and that no order of completions changes
// a weight or a residency. Runs under the address, undefined and thread sanitizers.
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "tests/packed_model.hpp"

using namespace std::chrono_literals;

namespace zipmoe {
namespace {

constexpr uint32_t kExperts = 12;

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

bool separable(const std::string& codec) { return find_codec(codec).capabilities().separable; }

// Passes reads on and delivers their completions late and in another order, from a thread of its own.
class ShufflingReader final : public Reader, public ReadSink {
 public:
  ShufflingReader(std::unique_ptr<Reader> inner, uint32_t seed) : inner_(std::move(inner)), generator_(seed) {
    courier_ = std::thread([this] { deliver(); });
  }
  ~ShufflingReader() override {
    inner_.reset();  // completes everything
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    arrived_.notify_all();
    courier_.join();
  }

  void submit(const ReadJob& job) override {
    {
      std::lock_guard lock(mutex_);
      sink_ = job.sink;
      ++under_way_;
    }
    ReadJob redirected = job;
    redirected.sink = this;
    inner_->submit(redirected);
  }
  void cancel() noexcept override { inner_->cancel(); }
  void read_completed(const ReadCompletion& completion) noexcept override {
    {
      std::lock_guard lock(mutex_);
      held_.push_back(completion);
    }
    arrived_.notify_all();
  }
  ReadCounters counters() const override { return inner_->counters(); }
  std::string mode() const override { return inner_->mode(); }
  std::string fallback_reason() const override { return inner_->fallback_reason(); }

 private:
  void deliver() {
    std::unique_lock lock(mutex_);
    for (;;) {
      // Mostly wait until everything that is under way has arrived: then any of it may come first.
      const bool patient = generator_() % 4 != 0;
      arrived_.wait(lock, [&] { return stopping_ || (!held_.empty() && (!patient || held_.size() == under_way_)); });
      if (held_.empty()) return;
      const size_t chosen = generator_() % held_.size();
      const ReadCompletion completion = held_[chosen];
      held_.erase(held_.begin() + static_cast<ptrdiff_t>(chosen));
      --under_way_;
      const uint32_t delay = generator_() % 40;
      ReadSink* sink = sink_;
      lock.unlock();
      for (uint32_t i = 0; i < delay; ++i) std::this_thread::yield();
      sink->read_completed(completion);
      lock.lock();
    }
  }

  std::unique_ptr<Reader> inner_;
  std::mt19937 generator_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  ReadSink* sink_ = nullptr;
  std::vector<ReadCompletion> held_;
  uint64_t under_way_ = 0;
  bool stopping_ = false;
  std::thread courier_;
};

std::unique_ptr<Reader> shuffling_reader(const PackedModel& model, const EngineOptions& options, uint32_t seed) {
  auto inner = std::make_unique<ThreadPoolReader>(std::vector<std::string>{model.path()}, options.reader.threads);
  return std::make_unique<ShufflingReader>(std::move(inner), seed);
}

void check_expert(Engine& engine, const PackedModel& model, RecordIndex record) {
  for (uint32_t matrix = 0; matrix < 2; ++matrix) {
    const std::vector<uint16_t>& expected = model.weights(record, matrix);
    if (const std::optional<uint64_t> offset = engine.decoded_offset(record, matrix)) {
      CHECK(*offset % 64 == 0 && engine.residency(record) == Residency::full);
      const auto* weights = reinterpret_cast<const uint16_t*>(engine.arena()->data() + *offset);
      CHECK(std::equal(expected.begin(), expected.end(), weights));
    }
    std::vector<uint16_t> decoded(expected.size());
    engine.decode(record, matrix, 0, kShapes[matrix].rows, decoded);
    CHECK(decoded == expected);
    std::vector<uint16_t> rows(2 * kShapes[matrix].columns);
    engine.decode(record, matrix, 5, 7, rows);
    CHECK(std::equal(rows.begin(), rows.end(), expected.begin() + static_cast<ptrdiff_t>(5 * kShapes[matrix].columns)));
  }
}

void check_occupancy(const Engine& engine) {
  const std::vector<PoolSlots> slots = engine.pool_slots();
  const std::vector<PoolSlots> held = engine.pool_occupancy();
  for (size_t group = 0; group < slots.size(); ++group) {
    for (uint32_t pool = 0; pool < kPools; ++pool) CHECK(held[group].experts[pool] <= slots[group].experts[pool]);
  }
}

std::vector<Residency> residencies(const Engine& engine) {
  std::vector<Residency> result;
  for (RecordIndex record = 0; record < kExperts; ++record) result.push_back(engine.residency(record));
  return result;
}

// Runs one request, checks every expert; stops after `limit` of them.
std::vector<RecordIndex> run(Engine& engine, const PackedModel& model, const std::vector<RecordIndex>& records,
                             HandOutOrder order = HandOutOrder::as_available, size_t limit = SIZE_MAX) {
  std::vector<RecordIndex> handed_out;
  engine.begin_request(records, order);
  while (handed_out.size() < limit) {
    const RequestStep step = engine.next_expert(1000ms);
    if (step.kind == RequestStep::Kind::finished) break;
    if (step.kind == RequestStep::Kind::waiting) continue;
    handed_out.push_back(records[step.position]);
    check_expert(engine, model, handed_out.back());
  }
  engine.end_request();
  check_occupancy(engine);
  if (limit == SIZE_MAX) {
    CHECK(std::set(handed_out.begin(), handed_out.end()).size() == records.size());
    if (order == HandOutOrder::ascending) CHECK(std::is_sorted(handed_out.begin(), handed_out.end()));
  }
  return handed_out;
}

std::vector<RecordIndex> choose(std::mt19937& generator, size_t count) {
  std::vector<RecordIndex> all(kExperts);
  for (RecordIndex record = 0; record < kExperts; ++record) all[record] = record;
  std::shuffle(all.begin(), all.end(), generator);
  all.resize(count);
  return all;
}

void test_weights_and_residencies_do_not_depend_on_the_order_of_completions() {
  uint32_t seed = 0;
  for (const std::string& codec : codecs_to_test()) {
    const PackedModel model(codec, kExperts, separable(codec) ? 3 : 1);
    for (const PoolSet& pools : kPoolSets) {
      if (pools.separable_only && !separable(codec)) continue;
      for (const uint32_t staging : {1U, 3U}) {
        const EngineOptions options = model.pool_options(pools.slots, staging, 1 + seed % 3);
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
      const EngineOptions options = model.pool_options(pools.slots, 2);
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
