// All experts of a request at once: who may be taken, how long they stay, and what is computed of them jointly.
#include <algorithm>
#include <functional>

#include "tests/small_layer.hpp"

using namespace std::chrono_literals;

namespace zipmoe {
namespace {

constexpr uint64_t kHidden = SmallLayer::kHidden;
constexpr uint32_t kExperts = SmallLayer::kExperts;

// The output of one expert on one row.
Words output_of(Engine& engine, const SmallLayer& layer, RecordIndex record, const Words& x) {
  Words out(kHidden);
  engine.feed_forward(record, layer.block(Shared::none).network, BFloat16Rows{x, 1}, out);
  return out;
}

// The same of every expert, each handed out alone.
std::vector<Words> outputs_of_all(const SmallLayer& layer, const Words& x) {
  Engine engine(layer.model.table(), layer.model.options(2));
  load_dense(engine);
  std::vector<Words> outputs(kExperts);
  for (RecordIndex record = 0; record < kExperts; ++record) {
    engine.begin_request({record}, HandOutOrder::as_available);
    hand_out(engine, [&](uint32_t) { outputs[record] = output_of(engine, layer, record, x); });
    engine.end_request();
  }
  return outputs;
}

struct Joint {
  explicit Joint(uint32_t slots = 5) : run(layer, slots), outputs(outputs_of_all(layer, x)) {}

  bool readable(RecordIndex record) {
    try {
      CHECK(output_of(*run.engine, layer, record, x) == outputs[record]);
      return true;
    } catch (const std::logic_error&) {
      return false;
    }
  }
  std::vector<RecordIndex> readable_ones() {
    std::vector<RecordIndex> found;
    for (RecordIndex record = 0; record < kExperts; ++record) {
      if (readable(record)) found.push_back(record);
    }
    return found;
  }
  RequestStep next() { return run.engine->next_expert(0ms); }

  const SmallLayer layer;
  const Words x = gaussian(kHidden, 31);
  SteppedLayer run;
  const std::vector<Words> outputs;
};

using Records = std::vector<RecordIndex>;

void test_residents_are_taken_all_at_once_until_the_request_ends() {
  for (const HandOutOrder order : {HandOutOrder::as_available, HandOutOrder::ascending}) {
    Joint joint;
    Engine& engine = *joint.run.engine;
    EXPECT_ERROR(std::logic_error, engine.take_all());  // no request is open
    make_resident(engine, {1, 3, 4, 6});
    const Records wanted = {6, 1, 4};
    engine.begin_request(wanted, order);
    engine.require_begun(wanted);
    CHECK(joint.readable_ones().empty());
    CHECK(engine.take_all());
    EXPECT_ERROR(std::invalid_argument, engine.require_begun(wanted));
    CHECK((joint.readable_ones() == Records{1, 4, 6}));  // 3 is resident, and was not asked for
    CHECK(!engine.take_all());                           // they have been handed out
    for (int i = 0; i < 2; ++i) CHECK(joint.next().kind == RequestStep::Kind::finished);
    CHECK((joint.readable_ones() == Records{1, 4, 6}));
    const Words& weights = joint.layer.model.weights(4, 1);
    Words decoded(weights.size());
    engine.decode(4, 1, 0, kShapes[1].rows, decoded);
    CHECK(decoded == weights);
    engine.end_request();
    CHECK(joint.readable_ones().empty());
    const EngineCounters counters = engine.counters();
    CHECK(counters.requests == 2 && counters.hits == 3 && counters.misses == 4 && counters.prefetched == 0);
    check_at_rest(engine, 5);
    engine.begin_request({4}, order);
    CHECK(joint.readable_ones().empty());  // what was taken before is forgotten
    engine.end_request();
    EXPECT_ERROR(std::logic_error, engine.take_all());
    engine.close();
    EXPECT_ERROR(std::logic_error, engine.take_all());
  }
}

void test_nobody_is_taken_while_one_is_missing() {
  for (const HandOutOrder order : {HandOutOrder::as_available, HandOutOrder::ascending}) {
    Joint joint;
    Engine& engine = *joint.run.engine;
    make_resident(engine, {1, 3});
    joint.run.reader->at_once = false;
    const Records wanted = {1, 2, 3};
    engine.begin_request(wanted, order);
    CHECK(!engine.take_all());
    CHECK(joint.readable_ones().empty());
    engine.require_begun(wanted);  // nobody was handed out
    joint.run.reader->run();
    Records handed_out;
    while (joint.next().kind == RequestStep::Kind::record) {
      const Records readable = joint.readable_ones();
      CHECK(readable.size() == 1);
      handed_out.push_back(readable[0]);
      CHECK(!engine.take_all());
      CHECK(joint.readable_ones() == readable);
    }
    std::ranges::sort(handed_out);
    CHECK(handed_out == wanted);
    engine.end_request();
    CHECK(engine.counters().hits == 2 && engine.counters().misses == 2 + 1);
    check_at_rest(engine, 5);
  }
}

void test_nobody_is_taken_behind_one_who_was_handed_out() {
  for (const HandOutOrder order : {HandOutOrder::as_available, HandOutOrder::ascending}) {
    Joint joint;
    Engine& engine = *joint.run.engine;
    make_resident(engine, {1, 2});
    engine.begin_request({1, 2}, order);
    for (const RecordIndex expected : {1, 2}) {
      CHECK(joint.next().kind == RequestStep::Kind::record);
      CHECK(!engine.take_all());
      CHECK(joint.readable_ones() == Records{expected});
    }
    CHECK(joint.next().kind == RequestStep::Kind::finished);
    CHECK(!engine.take_all() && joint.readable_ones().empty());
    engine.end_request();
  }
}

void test_nobody_is_taken_from_pools() {
  const SmallLayer layer;
  for (const PoolSlots& slots : {PoolSlots{{3, 0, 0, 0}}, PoolSlots{{0, 3, 0, 0}}}) {
    Engine engine(layer.model.table(), layer.model.pool_options(slots, 2));
    load_dense(engine);
    for (int round = 0; round < 2; ++round) {
      engine.begin_request({1, 2}, HandOutOrder::as_available);
      CHECK(!engine.take_all());
      engine.require_begun(Records{1, 2});
      uint32_t handed_out = 0;
      hand_out(engine, [&](uint32_t) { ++handed_out; });
      CHECK(handed_out == 2);
      engine.end_request();
    }
    CHECK(engine.counters().hits == 2);
  }
}

void test_who_was_read_ahead_is_taken_and_predictions_push_nobody_out() {
  Joint joint(5);
  Engine& engine = *joint.run.engine;
  engine.enable_look_ahead(2);
  make_resident(engine, {0, 1});
  CHECK(engine.predict_next({2}) == std::vector<size_t>{0});
  engine.begin_request({0, 1, 2}, HandOutOrder::as_available);
  CHECK(engine.take_all());
  engine.predict({5, 6, 7});
  CHECK((joint.readable_ones() == Records{0, 1, 2}));
  CHECK(joint.next().kind == RequestStep::Kind::finished);
  CHECK((joint.readable_ones() == Records{0, 1, 2}));
  engine.end_request();
  const EngineCounters counters = engine.counters();
  CHECK(counters.hits == 2 && counters.misses == 2 && counters.prefetched == 1);
  CHECK(engine.resident(0) && engine.resident(1) && engine.resident(2));
  check_at_rest(engine, 5);
}

void test_an_empty_request_is_taken() {
  Joint joint;
  joint.run.engine->begin_request({}, HandOutOrder::as_available);
  CHECK(joint.run.engine->take_all());
  CHECK(joint.next().kind == RequestStep::Kind::finished && joint.readable_ones().empty());
  joint.run.engine->end_request();
}

// Several experts and a dense network at once.
constexpr uint64_t kExpertRows = 9;  // of all experts of a step

struct JointStep {
  explicit JointStep(const SmallLayer& layer) : network(layer.block(Shared::none).network), dense(layer.network()) {}

  void run(Engine& engine) {
    std::vector<ExpertRows> experts;
    for (size_t i = 0; i < records.size(); ++i) experts.push_back({records[i], numbers[i]});
    engine.feed_forward_jointly(experts, network, {std::span(x).first(values), rows}, std::span(out).first(outputs),
                                with_dense ? &dense : nullptr, std::span(dense_out).first(dense_outputs));
  }

  static constexpr uint64_t kRows = 5;
  Records records = {6, 1, 3};
  std::vector<std::vector<uint64_t>> numbers = {{4, 0, 4}, {2}, {0, 1, 2, 3, 4}};
  ExpertNetwork network;
  DenseNetwork dense;
  bool with_dense = true;
  uint64_t rows = kRows;
  uint64_t values = kRows * kHidden;
  uint64_t outputs = kExpertRows * kHidden;
  uint64_t dense_outputs = kRows * kHidden;
  Words x = gaussian(kRows * kHidden, 41);
  Words out = Words(kExpertRows * (kHidden + 1));
  Words dense_out = Words(kRows * kHidden + kRows);
};

// Activations that are computed together with the experts', and others.
std::vector<std::function<void(JointStep&)>> activations() {
  return {
      [](JointStep&) {},
      [](JointStep& step) { step.dense.activation.layout = GateLayout::interleaved; },
      [](JointStep& step) { step.network.activation.layout = GateLayout::interleaved; },
      [](JointStep& step) { step.dense.activation.function = ActivationFunction::gelu; },
      [](JointStep& step) { step.network.activation.function = ActivationFunction::relu2; },
      [](JointStep& step) { step.dense.activation.limit = 0.5f; },
      [](JointStep& step) { step.dense.activation.up_offset = 1.0f; },
      [](JointStep& step) { step.network.activation.rounds_between = false; },
      [](JointStep& step) { step.with_dense = false; },
  };
}

void test_joint_networks_are_those_computed_alone() {
  const SmallLayer layer;
  for (const InstructionSet each : supported_instruction_sets()) {
    for (const uint32_t threads : {1U, 3U}) {
      EngineOptions options = layer.model.options(kExperts, threads);
      options.instruction_set = each;
      Engine engine(layer.model.table(), options);
      load_dense(engine);
      for (const auto& change : activations()) {
        JointStep step(layer);
        change(step);
        Words expected;
        engine.begin_request(step.records, HandOutOrder::ascending);
        std::vector<Words> alone(step.records.size());
        hand_out(engine, [&](uint32_t position) {
          alone[position].resize(step.numbers[position].size() * kHidden);
          engine.feed_forward(step.records[position], step.network,
                              SelectedRows{{step.x, step.rows}, step.numbers[position]}, alone[position]);
        });
        engine.end_request();
        for (const Words& output : alone) expected.insert(expected.end(), output.begin(), output.end());
        expected.resize(step.out.size());
        Words expected_dense(step.dense_out.size());
        if (step.with_dense) {
          engine.feed_forward_step(step.dense, {step.x, step.rows},
                                   std::span(expected_dense).first(step.dense_outputs));
        }
        engine.begin_request(step.records, HandOutOrder::as_available);
        CHECK(engine.take_all());
        step.run(engine);
        CHECK(step.out == expected && step.dense_out == expected_dense);
        engine.end_request();
      }
    }
  }
}

void test_joint_networks_of_another_shape_are_refused() {
  const SmallLayer layer;
  Engine engine(layer.model.table(), layer.model.options(kExperts));
  load_dense(engine);
  make_resident(engine, {0, 1, 2, 3, 4, 5, 6, 7});
  const std::vector<std::function<void(JointStep&)>> changes = {
      [](JointStep& step) { step.rows = 0; },
      [](JointStep& step) { step.values = 0; },
      [](JointStep& step) { step.values -= 1; },
      [](JointStep& step) { step.values -= step.rows; },
      [](JointStep& step) { step.outputs -= 1; },
      [](JointStep& step) { step.outputs += 1; },
      [](JointStep& step) { step.outputs -= kExpertRows; },
      [](JointStep& step) { step.outputs += kExpertRows; },
      [](JointStep& step) { step.outputs = 0; },
      [](JointStep& step) { step.dense_outputs -= 1; },
      [](JointStep& step) { step.dense_outputs += step.rows; },
      [](JointStep& step) { step.numbers[1] = {5}; },  // there is no such row
      [](JointStep& step) { step.numbers[1] = {UINT64_MAX}; },
      [](JointStep& step) {  // no rows at all are not all of them
        step.outputs -= kHidden;
        step.numbers[1] = {};
      },
      [](JointStep& step) {
        step.records = {};
        step.outputs = 0;
      },
      [](JointStep& step) { step.network.down = 0; },
      [](JointStep& step) { step.network.up = 0; },
      [](JointStep& step) { step.network.activation.layout = GateLayout::none; },
      [](JointStep& step) { step.dense.activation.layout = GateLayout::none; },
      [](JointStep& step) { step.dense.up.blocks = {}; },
      [](JointStep& step) { step.dense.down.blocks.push_back(SmallLayer::kFirst); },
  };
  for (const auto& change : changes) {
    JointStep step(layer);
    engine.begin_request(step.records, HandOutOrder::as_available);
    CHECK(engine.take_all());
    step.run(engine);
    change(step);
    EXPECT_ERROR(std::invalid_argument, step.run(engine));
    engine.end_request();
  }
  JointStep step(layer);
  engine.begin_request(step.records, HandOutOrder::as_available);
  CHECK(engine.take_all());
  step.network.down = 2;
  EXPECT_ERROR(std::out_of_range, step.run(engine));
  step.network.down = 1;
  step.records[1] = 99;
  EXPECT_ERROR(std::out_of_range, step.run(engine));
  step.records[1] = 2;  // resident
  EXPECT_ERROR(std::logic_error, step.run(engine));
  step.records[1] = 1;
  step.dense.gate.blocks = {2};
  EXPECT_ERROR(std::logic_error, step.run(engine));
  engine.end_request();
}

void test_only_who_was_handed_out_is_computed() {
  const SmallLayer layer;
  Engine engine(layer.model.table(), layer.model.options(kExperts));
  load_dense(engine);
  JointStep step(layer);
  const auto refused = [&] { EXPECT_ERROR(std::logic_error, step.run(engine)); };
  refused();  // no request is open
  make_resident(engine, step.records);
  engine.begin_request(step.records, HandOutOrder::as_available);
  refused();
  engine.next_expert(0ms);
  refused();  // one of them is there
  JointStep alone(layer);
  alone.records = {step.records[0]};
  alone.outputs = alone.numbers[0].size() * kHidden;
  alone.run(engine);
  engine.end_request();
  refused();
  engine.begin_request(step.records, HandOutOrder::as_available);
  CHECK(engine.take_all());
  step.run(engine);
  CHECK(std::equal(alone.out.begin(), alone.out.begin() + static_cast<ptrdiff_t>(alone.outputs), step.out.begin()));
  engine.close();
  refused();
}

// A codec without fused kernels: nothing is computed, not even where experts lie decoded in memory.
void test_other_codecs_are_refused() {
  for (const std::string& codec : codecs_to_test()) {
    if (find_codec(codec).capabilities().fused) continue;
    const SmallLayer layer(codec);
    Engine engine(layer.model.table(), layer.model.pool_options({{kExperts, 0, 0, 0}}, 2));
    load_dense(engine);
    const Words x = gaussian(kHidden, 31);
    JointStep step(layer);
    step.records = {1};
    step.outputs = step.numbers[0].size() * kHidden;
    for (int round = 0; round < 3; ++round) {
      engine.begin_request({1}, HandOutOrder::as_available);
      hand_out(engine, [&](uint32_t) {
        EXPECT_ERROR(std::invalid_argument, output_of(engine, layer, 1, x));
        EXPECT_ERROR(std::invalid_argument, step.run(engine));
      });
      engine.end_request();
    }
    CHECK(engine.residency(1) == Residency::full);
    engine.close();
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_residents_are_taken_all_at_once_until_the_request_ends();
  zipmoe::test_nobody_is_taken_while_one_is_missing();
  zipmoe::test_nobody_is_taken_behind_one_who_was_handed_out();
  zipmoe::test_nobody_is_taken_from_pools();
  zipmoe::test_who_was_read_ahead_is_taken_and_predictions_push_nobody_out();
  zipmoe::test_an_empty_request_is_taken();
  zipmoe::test_joint_networks_are_those_computed_alone();
  zipmoe::test_joint_networks_of_another_shape_are_refused();
  zipmoe::test_only_who_was_handed_out_is_computed();
  zipmoe::test_other_codecs_are_refused();
  std::puts("joint_experts_test: ok");
  return 0;
}
