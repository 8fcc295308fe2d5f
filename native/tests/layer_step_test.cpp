// Steps through a decoder layer give the bits of the calls that they are made of, and leave nothing open when they
// fail.
#include "runtime/layer_step.hpp"

#include <algorithm>
#include <set>

#include "tests/small_layer.hpp"

namespace zipmoe {
namespace {

constexpr uint64_t kHidden = SmallLayer::kHidden;
constexpr uint32_t kExperts = SmallLayer::kExperts;

void nobody_waits() {}

// `sum` and `normed` of so many rows, and what comes of them.
struct Rows {
  explicit Rows(uint64_t rows, uint64_t seed = 1)
      : count(rows), sum(gaussian(rows * kHidden, seed)), normed(gaussian(rows * kHidden, seed + 100)) {}

  BFloat16Rows x() const { return {normed, count}; }
  Words sparse(Engine& engine, const SparseBlock& block, const WaitingObserver& observer = nobody_waits) const {
    Words out(normed.size());
    sparse_block_in_layer(engine, block, x(), sum.data(), out.data(), observer);
    return out;
  }

  uint64_t count;
  Words sum;
  Words normed;
};

// The variants of a block: with and without everything that it may have.
std::vector<SparseBlock> variants(const SmallLayer& layer) {
  std::vector<SparseBlock> result;
  for (const Shared shared : {Shared::none, Shared::ungated, Shared::gated}) {
    for (const bool rounded : {false, true}) {
      for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
        SparseBlock block = layer.block(shared);
        block.rounded_weights = rounded;
        block.formula.score = score;
        block.formula.normalised = score == RouterScore::sigmoid;
        result.push_back(block);
      }
    }
  }
  return result;
}

void test_a_sparse_block_is_its_parts_one_after_the_other() {
  const SmallLayer layer;
  EngineOptions scalar = layer.model.options(kExperts);
  scalar.instruction_set = InstructionSet::scalar;
  Engine parts(layer.model.table(), scalar);
  load_dense(parts);
  for (const uint64_t count : {1, 3, 16}) {
    const Rows rows(count, count);
    std::set<Words> results;
    for (const SparseBlock& block : variants(layer)) {
      const Words expected = sparse_block_by_parts(parts, block, rows.normed, count, rows.sum);
      results.insert(expected);
      const uint64_t wanted = Choice(block, rows.normed, count).positions_of.size();
      for (const InstructionSet each : supported_instruction_sets()) {
        for (const uint32_t slots : {2U, kExperts}) {
          EngineOptions options = layer.model.options(slots, 1 + slots % 3);
          options.instruction_set = each;
          Engine engine(layer.model.table(), options);
          load_dense(engine);
          CHECK(rows.sparse(engine, block) == expected);
          CHECK(engine.counters().hits == 0 && engine.counters().misses == wanted);
          CHECK(rows.sparse(engine, block) == expected);  // with hits: all, where there is room for them
          const EngineCounters counters = engine.counters();
          CHECK(counters.requests == 2 && counters.hits + counters.misses == 2 * wanted);
          CHECK(slots == 2 ? counters.hits <= 2 : counters.hits == wanted);
          check_at_rest(engine, slots);
        }
      }
    }
    CHECK(count == 1 || results.size() == variants(layer).size());  // everything makes a difference
  }
}

void test_rows_of_the_same_experts() {
  const SmallLayer layer;
  Rows rows(16);
  for (uint64_t i = kHidden; i < rows.normed.size(); ++i) rows.normed[i] = rows.normed[i - kHidden];
  for (const uint64_t top_k : {uint64_t{1}, uint64_t{4}, uint64_t{kExperts}}) {
    const SparseBlock block = layer.block(Shared::gated, top_k);
    Engine engine(layer.model.table(), layer.model.options(kExperts));
    load_dense(engine);
    const Words expected = sparse_block_by_parts(engine, block, rows.normed, rows.count, rows.sum);
    for (int round = 0; round < 2; ++round) CHECK(rows.sparse(engine, block) == expected);
    CHECK(engine.counters().misses == top_k && engine.counters().hits == 2 * top_k);
  }
}

void test_a_sparse_block_with_pools() {
  const SmallLayer layer;
  const Rows rows(3);
  const SparseBlock block = layer.block(Shared::gated);
  Engine parts(layer.model.table(), layer.model.options(kExperts));
  load_dense(parts);
  const Words expected = sparse_block_by_parts(parts, block, rows.normed, rows.count, rows.sum);
  for (const PoolSlots& slots : {PoolSlots{{2, 2, 0, 0}}, PoolSlots{{0, 8, 0, 0}}, PoolSlots{{0, 0, 0, 0}}}) {
    Engine engine(layer.model.table(), layer.model.pool_options(slots, 2));
    load_dense(engine);
    for (int round = 0; round < 3; ++round) CHECK(rows.sparse(engine, block) == expected);
    const uint64_t wanted = Choice(block, rows.normed, rows.count).positions_of.size();
    CHECK(engine.counters().requests == 3 && engine.counters().hits + engine.counters().misses == 3 * wanted);
    EXPECT_ERROR(std::logic_error, engine.next_expert(std::chrono::milliseconds(0)));
  }
}

void test_the_observer_is_called_while_experts_are_waited_for() {
  const SmallLayer layer;
  const Rows rows(3);
  const SparseBlock block = layer.block(Shared::ungated);
  SteppedLayer run(layer);
  Engine parts(layer.model.table(), layer.model.options(kExperts));
  load_dense(parts);
  run.reader->at_once = false;
  int calls = 0;
  const Words out = rows.sparse(*run.engine, block, [&] {
    if (++calls == 2) run.reader->run();
  });
  CHECK(calls == 2 && out == sparse_block_by_parts(parts, block, rows.normed, rows.count, rows.sum));
  rows.sparse(*run.engine, block, [&] { ++calls; });
  CHECK(calls == 2);  // nobody is waited for
}

struct Stop {};

void test_what_the_observer_throws_leaves_nothing_open() {
  const SmallLayer layer;
  const Rows rows(1);
  const SparseBlock block = layer.block(Shared::gated);
  const std::vector<RecordIndex> wanted = Choice(block, rows.normed, rows.count).records(block);
  SteppedLayer run(layer, 3);
  make_resident(*run.engine, {wanted[0]});
  run.reader->at_once = false;
  int calls = 0;
  EXPECT_ERROR(Stop, rows.sparse(*run.engine, block, [&] {
    if (++calls == 2) throw Stop();
    // The hit has been computed; one of the others is handed out next.
    for (uint64_t byte = 0; byte < layer.model.record(wanted[1]).length; byte += 4096) CHECK(run.reader->step());
  }));
  EngineCounters counters = run.engine->counters();
  CHECK(counters.requests == 2 && counters.hits == 1 && counters.misses == 1 + 2);
  CHECK(run.engine->resident(wanted[0]) && run.engine->resident(wanted[1]) && !run.engine->resident(wanted[2]));
  check_at_rest(*run.engine, 3);
  run.reader->at_once = true;
  SteppedLayer untouched(layer, 3);
  CHECK(rows.sparse(*run.engine, block) == rows.sparse(*untouched.engine, block));
  counters = run.engine->counters();
  CHECK(counters.requests == 3 && counters.hits == 1 + 2 && counters.misses == 3 + 1);
}

void test_a_damaged_expert_leaves_nothing_open() {
  for (const size_t damaged : {0, 1, 2}) {
    const SmallLayer layer;
    const Rows rows(1);
    const SparseBlock block = layer.block(Shared::ungated);
    const std::vector<RecordIndex> wanted = Choice(block, rows.normed, rows.count).records(block);
    const RecordIndex broken = wanted[damaged];
    layer.model.flip_byte(layer.model.record(broken).offset + 70);
    SteppedLayer run(layer, 4);
    SteppedLayer ordinary(layer, 4);
    const RecordIndex intact = wanted[(damaged + 1) % 3];
    for (SteppedLayer* each : {&run, &ordinary}) make_resident(*each->engine, {intact});
    for (int round = 0; round < 2; ++round) {
      const auto error = EXPECT_ERROR(RecordError, rows.sparse(*run.engine, block));
      CHECK(error.record() == broken && error.fault() == RecordFault::checksum_mismatch);
      check_at_rest(*run.engine, 4);
      ordinary.engine->begin_request(wanted, HandOutOrder::as_available);
      EXPECT_ERROR(RecordError, hand_out(*ordinary.engine, [](uint32_t) {}));
      CHECK(!ordinary.engine->take_all());
      ordinary.engine->end_request();
      const EngineCounters found = run.engine->counters();
      const EngineCounters expected = ordinary.engine->counters();
      CHECK(found.requests == expected.requests && found.hits == expected.hits && found.misses == expected.misses);
      CHECK(found.hits >= 1 && found.by_residency == expected.by_residency);
      for (RecordIndex record = 0; record < kExperts; ++record) {
        CHECK(run.engine->resident(record) == ordinary.engine->resident(record));
      }
      CHECK(!run.engine->resident(broken) && run.engine->resident(intact));
    }
    std::vector<RecordIndex> others;
    for (RecordIndex record = 0; record < kExperts && others.size() < 4; ++record) {
      if (std::ranges::find(wanted, record) == wanted.end()) others.push_back(record);
    }
    make_resident(*run.engine, others);
    CHECK(run.engine->counters().requests == 4);
  }
}

void test_blocks_of_another_shape_are_refused() {
  SmallLayer layer;
  Engine engine(layer.model.table(), layer.model.options(kExperts));
  load_dense(engine);
  const Rows rows(2);
  const std::vector<std::function<void(SparseBlock&)>> changes = {
      [](SparseBlock& block) { block.formula.top_k = 0; },
      [](SparseBlock& block) { block.formula.top_k = kExperts + 1; },
      [](SparseBlock& block) { block.router = block.router.first(block.router.size() - 1); },
      [](SparseBlock& block) { block.experts.pop_back(); },
      [](SparseBlock& block) { block.experts.assign(kExperts, 3); },  // one record for several ids
      [](SparseBlock& block) { block.experts.assign(kExperts, SmallLayer::kFirst); },
      [](SparseBlock& block) { block.network.down = 0; },
      [](SparseBlock& block) { block.network.activation.layout = GateLayout::none; },
      [](SparseBlock& block) { block.shared->gate = block.shared->gate.first(kHidden - 1); },
      [](SparseBlock& block) { block.shared->gate_function = block.shared->gate_function.first(65535); },
      [](SparseBlock& block) { block.shared->network.up.blocks = {}; },
      [](SparseBlock& block) { block.shared->network.down.blocks.push_back(SmallLayer::kFirst); },
  };
  for (int round = 0; round < 2; ++round) {  // with misses, and with hits alone
    for (const auto& change : changes) {
      SparseBlock block = layer.block(Shared::gated);
      change(block);
      EXPECT_ERROR(std::invalid_argument, rows.sparse(engine, block));
      check_at_rest(engine, kExperts);
    }
    std::vector<RecordIndex> all(kExperts);
    for (RecordIndex record = 0; record < kExperts; ++record) all[record] = record;
    make_resident(engine, all);
  }
  const SparseBlock intact = layer.block(Shared::gated);
  Words out(rows.normed.size());
  const auto step = [&](uint64_t values, uint64_t count) {
    sparse_block_in_layer(engine, intact, {std::span(rows.normed).first(values), count}, rows.sum.data(), out.data(),
                          nobody_waits);
  };
  step(2 * kHidden, 2);
  for (const auto& [values, count] :
       {std::pair<uint64_t, uint64_t>{0, 0}, {0, 2}, {2 * kHidden - 1, 2}, {2 * kHidden - 2, 2}, {2 * kHidden, 1}}) {
    EXPECT_ERROR(std::invalid_argument, step(values, count));
    check_at_rest(engine, kExperts);
  }
}

void test_the_request_of_somebody_else_stays_open() {
  const SmallLayer layer;
  Engine engine(layer.model.table(), layer.model.options(kExperts));
  load_dense(engine);
  const Rows rows(1);
  engine.begin_request({1, 2}, HandOutOrder::ascending);
  EXPECT_ERROR(std::logic_error, rows.sparse(engine, layer.block(Shared::gated)));
  engine.require_begun(std::vector<RecordIndex>{1, 2});
  std::vector<uint32_t> positions;
  hand_out(engine, [&](uint32_t position) { positions.push_back(position); });
  CHECK((positions == std::vector<uint32_t>{0, 1}));
  engine.end_request();
  engine.close();
  EXPECT_ERROR(std::logic_error, rows.sparse(engine, layer.block(Shared::gated)));
}

// A layer's attention with a cache of its own, in which every value is told apart from what is written.
struct Attending {
  static constexpr uint64_t kHeads = 4;
  static constexpr uint64_t kDimension = kHidden / kHeads;
  static constexpr uint64_t kCapacity = 5;
  static constexpr uint64_t kLength = 2;

  explicit Attending(uint64_t rows) : count(rows), x(gaussian(rows * kHidden, 21)) {}

  KeyValueCache cache() { return {keys.data(), values.data(), kLength, kCapacity}; }
  RotaryPositions positions() const { return {cosines.data(), sines.data(), kDimension, kDimension}; }

  uint64_t count;
  Words x;
  Words weights_before = gaussian(kHidden, 22, 1.0f, 0.2f);
  Words weights_after = gaussian(kHidden, 23, 1.0f, 0.2f);
  LayerNorms norms{{weights_before.data(), 1e-5f}, {weights_after.data(), 0.25f}};
  AttentionLayer layer{.query = {{SmallLayer::kFirst}, {}},
                       .key = {{SmallLayer::kSecond}, {}},
                       .value = {{SmallLayer::kFirst}, {}},
                       .output = {{SmallLayer::kSecond}, {}},
                       .shape = {kHeads, kHeads, kDimension, 0.25f},
                       .query_norm = {},
                       .key_norm = {}};
  Words keys = gaussian(count * kHeads * kCapacity * kDimension, 24);
  Words values = gaussian(count * kHeads * kCapacity * kDimension, 25);
  Words cosines = gaussian(count * kDimension, 26);
  Words sines = gaussian(count * kDimension, 27);
  Words sum = Words(x.size());
  Words normed = Words(x.size());
};

void test_attention_in_a_layer_is_its_parts_one_after_the_other() {
  const SmallLayer small;
  Engine engine(small.model.table(), small.model.options(2));
  load_dense(engine);
  for (const uint64_t rows : {1, 3, 16}) {
    Attending parts(rows);
    const Words keys_before = parts.keys;
    const Words values_before = parts.values;
    Words attended(parts.x.size());
    engine.normalise(parts.norms.before_attention, {parts.x, rows}, parts.normed.data());
    engine.attention_step(parts.layer, {parts.normed, rows}, rows, 1, parts.positions(), parts.cache(), attended);
    Words value(parts.x.size());
    engine.multiply(parts.layer.value.blocks, {parts.normed, rows}, {}, value);
    parts.sum = sums_of(parts.x, attended);
    engine.normalise(parts.norms.before_feed_forward, {parts.sum, rows}, parts.normed.data());

    Attending whole(rows);
    const Words x = whole.x;
    attend_in_layer(engine, whole.norms, whole.layer, {whole.x, rows}, whole.positions(), whole.cache(),
                    whole.sum.data(), whole.normed.data());
    CHECK(whole.sum == parts.sum && whole.normed == parts.normed && whole.x == x);
    CHECK(whole.keys == parts.keys && whole.values == parts.values);
    CHECK(whole.sum != x && whole.normed != whole.sum);

    Words expected_values = values_before;
    for (uint64_t i = 0; i < whole.values.size(); ++i) {
      const uint64_t place = i / Attending::kDimension;  // [row][head][position]
      const bool fresh = place % Attending::kCapacity == Attending::kLength;
      const uint64_t head = place / Attending::kCapacity;
      if (fresh) expected_values[i] = value[head * Attending::kDimension + i % Attending::kDimension];
      if (!fresh) CHECK(whole.keys[i] == keys_before[i]);
    }
    CHECK(whole.values == expected_values && whole.keys != keys_before);
  }
}

void test_attention_in_a_layer_refuses_what_the_step_refuses() {
  const SmallLayer small;
  Engine engine(small.model.table(), small.model.options(2));
  load_dense(engine);
  const std::vector<std::function<void(Attending&, KeyValueCache&)>> changes = {
      [](Attending&, KeyValueCache& cache) { cache.length = cache.capacity; },
      [](Attending& step, KeyValueCache&) { step.x.pop_back(); },
      [](Attending& step, KeyValueCache&) { step.count = 0; },
      [](Attending& step, KeyValueCache&) { step.layer.shape.query_heads = 8; },
      [](Attending& step, KeyValueCache&) { step.layer.output.blocks.push_back(SmallLayer::kFirst); },
  };
  for (const auto& change : changes) {
    Attending step(3);
    KeyValueCache cache = step.cache();
    change(step, cache);
    EXPECT_ERROR(std::invalid_argument, attend_in_layer(engine, step.norms, step.layer, {step.x, step.count},
                                                        step.positions(), cache, step.sum.data(), step.normed.data()));
  }
}

void test_a_dense_network_in_a_layer_is_its_parts_one_after_the_other() {
  const SmallLayer small;
  Engine engine(small.model.table(), small.model.options(2));
  load_dense(engine);
  for (const uint64_t count : {1, 3, 16}) {
    const Rows rows(count);
    Words fed(rows.normed.size());
    engine.feed_forward_step(small.network(), rows.x(), fed);
    Words out(rows.normed.size());
    feed_forward_in_layer(engine, small.network(), rows.x(), rows.sum.data(), out.data());
    CHECK(out == sums_of(rows.sum, fed) && out != fed && out != rows.sum);
  }
  const Rows rows(2);
  Words out(rows.normed.size());
  DenseNetwork odd = small.network();
  odd.up.blocks.push_back(SmallLayer::kFirst);
  EXPECT_ERROR(std::invalid_argument, feed_forward_in_layer(engine, odd, rows.x(), rows.sum.data(), out.data()));
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_a_sparse_block_is_its_parts_one_after_the_other();
  zipmoe::test_rows_of_the_same_experts();
  zipmoe::test_a_sparse_block_with_pools();
  zipmoe::test_the_observer_is_called_while_experts_are_waited_for();
  zipmoe::test_what_the_observer_throws_leaves_nothing_open();
  zipmoe::test_a_damaged_expert_leaves_nothing_open();
  zipmoe::test_blocks_of_another_shape_are_refused();
  zipmoe::test_the_request_of_somebody_else_stays_open();
  zipmoe::test_attention_in_a_layer_is_its_parts_one_after_the_other();
  zipmoe::test_attention_in_a_layer_refuses_what_the_step_refuses();
  zipmoe::test_a_dense_network_in_a_layer_is_its_parts_one_after_the_other();
  std::puts("layer_step_test: ok");
  return 0;
}
