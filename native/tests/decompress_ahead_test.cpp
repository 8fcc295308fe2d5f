// Decompression ahead of demand: the same weights and residencies for any numbers of shards, workers, buffers and
// staging slots and any order of completions; damage; requests that are left. Runs under the thread sanitizer.
#include "runtime/decompress_ahead.hpp"

#include <fstream>

#include "tests/pool_requests.hpp"

namespace zipmoe {
namespace {

constexpr PoolSlots kPoolSets[] = {{{0, 3, 0, 0}}, {{0, 0, 3, 0}}, {{0, 0, 0, 3}}, {{1, 1, 2, 2}}, {{0, 0, 0, 0}}};

std::vector<std::string> separable_codecs() {
  std::vector<std::string> names;
  for (const std::string& codec : codecs_to_test()) {
    if (separable(codec)) names.push_back(codec);
  }
  return names;
}

uint64_t exponents_of(const PackedModel& model, RecordIndex record) {
  uint64_t bytes = 0;
  for (const RecordMatrix& matrix : model.record(record).matrices) bytes += matrix.shape.rows * matrix.shape.columns;
  return bytes;
}

// The background is done with everything that it can do for the open request.
void wait_for_ahead_bytes(const Engine& engine, uint64_t bytes) {
  while (engine.counters().ahead_bytes < bytes) std::this_thread::yield();
}

void test_nothing_depends_on_shards_workers_buffers_or_completions() {
  uint32_t seed = 0;
  for (const std::string& codec : separable_codecs()) {
    for (const uint32_t shards : {1U, 2U, 4U, 8U}) {
      const PackedModel model(codec, kExperts, shards);
      for (const uint32_t workers : {1U, 2U, 4U}) {
        for (const PoolSlots& slots : kPoolSets) {
          ++seed;
          const uint32_t staging = 1 + seed % 4;
          const EngineOptions options = model.pool_options(slots, staging, workers, 1 + seed % 3);
          Engine ahead(model.table(), options, shuffling_reader(model, options, seed));
          Engine plain(model.table(), model.pool_options(slots, staging, workers, 0));
          load_dense(ahead);
          load_dense(plain);
          std::mt19937 generator(seed);
          for (int round = 0; round < 6; ++round) {
            const std::vector<RecordIndex> wanted = choose(generator, round == 3 ? kExperts : 1 + generator() % 5);
            const HandOutOrder order = generator() % 2 == 0 ? HandOutOrder::ascending : HandOutOrder::as_available;
            run(ahead, model, wanted, order);
            run(plain, model, wanted, order);
            CHECK(residencies(ahead) == residencies(plain));
            CHECK(ahead.pool_occupancy() == plain.pool_occupancy());
          }
          CHECK(ahead.counters().decoded_bytes == plain.counters().decoded_bytes);
          CHECK(plain.counters().ready_bytes == 0 && plain.counters().ahead_bytes == 0);
        }
      }
    }
  }
}

void test_hit_counts_do_not_depend_on_timing() {
  for (const std::string& codec : separable_codecs()) {
    const PackedModel model(codec, kExperts, 4);
    for (const PoolSlots& slots : kPoolSets) {
      const EngineOptions options = model.pool_options(slots, kExperts, 2, 2);
      Engine shuffled(model.table(), options, shuffling_reader(model, options, 5));
      Engine plain(model.table(), model.pool_options(slots, kExperts, 2, 0));
      load_dense(shuffled);
      load_dense(plain);
      std::mt19937 generator(9);
      for (int round = 0; round < 20; ++round) {
        const std::vector<RecordIndex> wanted = choose(generator, 1 + generator() % 6);
        run(shuffled, model, wanted);
        run(plain, model, wanted);
      }
      const EngineCounters first = shuffled.counters();
      const EngineCounters second = plain.counters();
      CHECK(first.by_residency == second.by_residency && first.hits == second.hits);
      CHECK(first.part_read_bytes == second.part_read_bytes);
      CHECK(first.promotions == second.promotions && first.demotions == second.demotions);
    }
  }
}

void test_requests_left_in_the_middle() {
  uint32_t seed = 200;
  for (const std::string& codec : separable_codecs()) {
    for (const uint32_t workers : {1U, 2U, 4U}) {
      const PackedModel model(codec, kExperts, 4);
      const EngineOptions options = model.pool_options({{1, 1, 2, 2}}, 2, workers, 1 + seed % 2);
      Engine engine(model.table(), options, shuffling_reader(model, options, ++seed));
      load_dense(engine);
      std::mt19937 generator(seed);
      for (int round = 0; round < 40; ++round) {
        const std::vector<RecordIndex> wanted = choose(generator, 1 + generator() % kExperts);
        const HandOutOrder order = generator() % 2 == 0 ? HandOutOrder::ascending : HandOutOrder::as_available;
        run(engine, model, wanted, order, generator() % wanted.size());
        if (round % 5 == 0) run(engine, model, wanted, order);
      }
      engine.begin_request({0, 1, 2}, HandOutOrder::as_available);
    }  // an engine that is destroyed in the middle of a request
  }
}

void test_what_is_ready_is_only_recombined() {
  for (const std::string& codec : separable_codecs()) {
    const PackedModel model(codec, kExperts, 3);
    Engine engine(model.table(), model.pool_options({{0, 3, 0, 0}}, 1, 2, 2));
    load_dense(engine);
    run(engine, model, {0, 1});
    const EngineCounters start = engine.counters();
    engine.begin_request({0, 1}, HandOutOrder::as_available);
    wait_for_ahead_bytes(engine, start.ahead_bytes + exponents_of(model, 0) + exponents_of(model, 1));
    for (int i = 0; i < 2; ++i) {
      const RequestStep step = engine.next_expert(1000ms);
      CHECK(step.kind == RequestStep::Kind::record);
      check_expert(engine, model, step.position);
    }
    engine.end_request();
    const EngineCounters end = engine.counters();
    CHECK(end.ready_bytes - start.ready_bytes == end.decoded_bytes - start.decoded_bytes);
    CHECK(end.decompress_ahead_seconds > start.decompress_ahead_seconds);
  }
}

void test_more_experts_than_buffers() {
  // Two of four get a buffer; the consumer asks for all, in both orders, and a buffer that becomes free is used again.
  for (const HandOutOrder order : {HandOutOrder::ascending, HandOutOrder::as_available}) {
    const std::string codec = separable_codecs().front();
    const PackedModel model(codec, kExperts, 2);
    Engine engine(model.table(), model.pool_options({{0, 4, 0, 0}}, 1, 2, 2));
    load_dense(engine);
    run(engine, model, {0, 1, 2, 3});
    const uint64_t start = engine.counters().ahead_bytes;
    engine.begin_request({0, 1, 2, 3}, order);
    wait_for_ahead_bytes(engine, start + 2 * exponents_of(model, 0));
    for (uint32_t i = 0; i < 4; ++i) {
      const RequestStep step = engine.next_expert(1000ms);
      CHECK(step.kind == RequestStep::Kind::record);
      if (i == 1) wait_for_ahead_bytes(engine, start + 3 * exponents_of(model, 0));  // the first one's buffer
      check_expert(engine, model, step.position);
    }
    engine.end_request();
  }
}

// A byte of the E-chunks of a record whose damage only decompression finds: the first shard of matrix 0 is affected.
uint64_t hidden_damage(const PackedModel& model, const std::string& codec, RecordIndex index) {
  const Record& record = model.record(index);
  const RecordTable table = model.table();
  std::vector<uint8_t> bytes(record.length + kReadableTailBytes);
  std::ifstream stream(model.path(), std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(record.offset));
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(record.length));
  const Section& section = record.matrices[0].sections[0];
  for (uint64_t offset = section.offset; offset < section.offset + record.matrices[0].shard_bytes[0]; ++offset) {
    bytes[offset] ^= 0x10;
    const MatrixView view = table.view(index, 0, bytes.data());
    std::vector<uint16_t> out(kShapes[0].rows * kShapes[0].columns);
    bool valid = false;
    try {
      find_codec(codec).validate(view);
      valid = true;
      find_codec(codec).decode_rows(view, 0, kShapes[0].rows, out.data(), best_instruction_set());
    } catch (const FormatError&) {
      if (valid) return record.offset + offset;
    }
    bytes[offset] ^= 0x10;
  }
  CHECK(false && "no such byte");
  return 0;
}

void test_damage_found_in_the_background_is_raised_where_the_matrix_is_asked_for() {
  for (const std::string& codec : separable_codecs()) {
    const PackedModel model(codec, kExperts, 2);
    const uint64_t damaged = hidden_damage(model, codec, 3);
    model.flip_byte(damaged);
    std::string messages[2];
    for (const uint32_t buffers : {0U, 2U}) {
      EngineOptions options = model.pool_options({{0, 4, 0, 0}}, 2, 2, buffers);
      options.verify = VerifyMode::never;
      Engine engine(model.table(), options);
      load_dense(engine);
      for (int round = 0; round < 3; ++round) {
        const uint64_t ahead = engine.counters().ahead_bytes;
        engine.begin_request({3}, HandOutOrder::as_available);
        const RequestStep step = engine.next_expert(1000ms);
        CHECK(step.kind == RequestStep::Kind::record);
        // In the last round the background has met the damage for certain.
        if (buffers > 0 && round == 2) wait_for_ahead_bytes(engine, ahead + exponents_of(model, 3));
        std::vector<uint16_t> out(kShapes[0].rows * kShapes[0].columns);
        const auto error = EXPECT_ERROR(RecordError, engine.decode(3, 0, 0, kShapes[0].rows, out));
        CHECK(error.record() == 3 && error.fault() == RecordFault::invalid_encoding);
        messages[buffers / 2] = error.what();
        // The other matrix is intact, and so are the second shard's rows of this one.
        std::vector<uint16_t> other(kShapes[1].rows * kShapes[1].columns);
        engine.decode(3, 1, 0, kShapes[1].rows, other);
        CHECK(other == model.weights(3, 1));
        const std::vector<uint16_t>& weights = model.weights(3, 0);
        std::vector<uint16_t> second(weights.size() / 2);
        engine.decode(3, 0, kShapes[0].rows / 2, kShapes[0].rows, second);
        CHECK(std::equal(second.begin(), second.end(), weights.begin() + static_cast<ptrdiff_t>(second.size())));
        engine.end_request();
        run(engine, model, {0, 1, 2, 4});
      }
    }
    CHECK(messages[0] == messages[1] && !messages[0].empty());
  }
}

void test_an_expert_that_becomes_decoded_uses_what_is_ready() {
  for (const std::string& codec : separable_codecs()) {
    const PackedModel model(codec, kExperts, 3);
    EngineOptions options = model.pool_options({{1, 1, 0, 0}}, 1, 2, 2);
    options.pools->tolerance = 0;
    Engine engine(model.table(), options, shuffling_reader(model, options, 3));
    load_dense(engine);
    for (int round = 0; round < 30; ++round) {
      run(engine, model, {0, 1});
      run(engine, model, {round % 2 == 0 ? 0U : 1U, 2});
    }
    CHECK(engine.counters().by_residency[static_cast<size_t>(Residency::full)] > 0);
  }
}

void test_shards_begin_only_with_chunks_and_buffers() {
  const std::string codec = separable_codecs().front();
  const PackedModel model(codec, kExperts, 2);
  const RecordTable table = model.table();
  const Record& record = model.record(4);
  std::vector<uint8_t> bytes(record.length);
  std::ifstream stream(model.path(), std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(record.offset));
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(record.length));
  const std::vector<ShardTask> priority = {{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}};
  std::vector<uint8_t> buffer(table.exponent_bytes(4));
  DecompressAhead ahead(table, 2);
  using State = DecompressAhead::ShardState;

  ahead.begin({4}, priority, {});
  ahead.expect(0, bytes.data(), true);
  CHECK(!ahead.help() && !ahead.complete(0));  // no buffer
  DecompressAhead::Claim claim = ahead.claim(0, 0, 0, 2);
  CHECK(claim.exponents == nullptr && claim.shards == (std::vector{State::claimed, State::claimed}));
  ahead.release();
  ahead.end();
  ahead.end();

  ahead.begin({4}, priority, {buffer.data()});
  ahead.expect(0, bytes.data(), false);
  CHECK(!ahead.help());  // not yet read
  claim = ahead.claim(0, 1, 1, 2);
  CHECK(claim.shards == std::vector{State::claimed});
  ahead.parts_arrived(4, {false, true});
  ahead.release();
  CHECK(!ahead.help());  // only the SM-chunks are there
  ahead.parts_arrived(4, {true, false});
  while (!ahead.complete(0)) ahead.help();
  claim = ahead.claim(0, 0, 0, 2);
  CHECK(claim.exponents == buffer.data() && claim.shards == (std::vector{State::done, State::done}));
  ahead.release();
  for (size_t i = 0; i < kShapes[0].rows * kShapes[0].columns; ++i) {
    CHECK(claim.exponents[i] == static_cast<uint8_t>(model.weights(4, 0)[i] >> 7));
  }
  ahead.withdraw(0);
  CHECK(!ahead.complete(0) && !ahead.help());
  ahead.expect(0, bytes.data(), true);  // read once more
  while (!ahead.complete(0)) ahead.help();
  ahead.end();
  ahead.parts_arrived(4, {true, true});  // too late: nobody wants it any more
}

void test_each_part_is_verified_at_its_own_first_read() {
  for (const std::string& codec : separable_codecs()) {
    const PackedModel model(codec, 2, 2);
    const RecordTable table = model.table();
    const Record& record = model.record(1);
    std::vector<uint8_t> bytes(record.length);
    std::ifstream stream(model.path(), std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(record.offset));
    stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(record.length));
    const PartPlaces places = table.places(1, bytes.data());
    RecordVerifier verifier(table, VerifyMode::first);
    verifier.verify(1, places, {true, false});
    bytes[record.extents[1].offset + 7] ^= 1;
    const auto error = EXPECT_ERROR(RecordError, verifier.verify(1, places, {false, true}));
    CHECK(error.fault() == RecordFault::checksum_mismatch);
    bytes[record.extents[1].offset + 7] ^= 1;
    verifier.verify(1, places, {false, true});
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  if (zipmoe::separable_codecs().empty()) {
    std::puts("decompress_ahead_test: no codec holds exponents apart in this build");
    return 0;
  }
  zipmoe::test_shards_begin_only_with_chunks_and_buffers();
  zipmoe::test_each_part_is_verified_at_its_own_first_read();
  zipmoe::test_what_is_ready_is_only_recombined();
  zipmoe::test_more_experts_than_buffers();
  zipmoe::test_damage_found_in_the_background_is_raised_where_the_matrix_is_asked_for();
  zipmoe::test_an_expert_that_becomes_decoded_uses_what_is_ready();
  zipmoe::test_requests_left_in_the_middle();
  zipmoe::test_hit_counts_do_not_depend_on_timing();
  zipmoe::test_nothing_depends_on_shards_workers_buffers_or_completions();
  std::puts("decompress_ahead_test: ok");
  return 0;
}
