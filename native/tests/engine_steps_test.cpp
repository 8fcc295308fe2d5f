// Products and parts of a decoder layer on dense matrices of the engine: what they are made of, and what they refuse.
#include <algorithm>
#include <functional>

#include "compute/bfloat16.hpp"
#include "simd/instruction_set.hpp"
#include "simd/prompt_attention_kernels.hpp"
#include "tests/packed_model.hpp"

namespace zipmoe {
namespace {

using Words = std::vector<uint16_t>;

constexpr uint64_t kSize = 32;  // of hidden rows, queries, keys, values alike
constexpr RecordIndex kExpert = 0;
constexpr RecordIndex kFirst = 1;  // the dense blocks, 32 x 32 each
constexpr RecordIndex kSecond = 2;

Words gaussian(uint64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Words words(count);
  for (uint16_t& word : words) word = float_to_bfloat16(normal(random));
  return words;
}

struct Loaded {
  explicit Loaded(MatrixShape block = {kSize, kSize})
      : model("fx3", 1, 1, block), engine(model.table(), model.options(1)) {
    load_dense(engine);
  }
  PackedModel model;
  Engine engine;
};

Words multiplied(Engine& engine, const std::vector<RecordIndex>& blocks, const Words& x, uint64_t rows,
                 const Words& bias = {}, uint64_t out_columns = kSize) {
  Words out(rows * out_columns);
  engine.multiply(blocks, {x, rows}, bias, out);
  return out;
}

void test_a_matrix_of_several_blocks_is_their_products_side_by_side() {
  Loaded loaded;
  for (const uint64_t rows : {1, 3, 9}) {
    const Words x = gaussian(rows * kSize, 1);
    const Words bias = gaussian(2 * kSize, 2);
    const Words together = multiplied(loaded.engine, {kFirst, kSecond}, x, rows, bias, 2 * kSize);
    for (const RecordIndex block : {kFirst, kSecond}) {
      const uint64_t begin = (block - kFirst) * kSize;
      const Words own_bias(bias.begin() + static_cast<ptrdiff_t>(begin),
                           bias.begin() + static_cast<ptrdiff_t>(begin + kSize));
      const Words alone = multiplied(loaded.engine, {block}, x, rows, own_bias);
      for (uint64_t row = 0; row < rows; ++row) {
        CHECK(std::equal(alone.begin() + static_cast<ptrdiff_t>(row * kSize),
                         alone.begin() + static_cast<ptrdiff_t>((row + 1) * kSize),
                         together.begin() + static_cast<ptrdiff_t>(row * 2 * kSize + begin)));
      }
    }
  }
}

void test_products_of_another_shape_are_refused() {
  Loaded loaded;
  Engine& engine = loaded.engine;
  const Words x = gaussian(2 * kSize, 1);
  Words out(2 * 2 * kSize + 1);
  const auto product = [&](const std::vector<RecordIndex>& blocks, uint64_t values, uint64_t rows, uint64_t outputs,
                           uint64_t biases = 0) {
    const Words bias(biases);
    engine.multiply(blocks, {std::span(x).first(values), rows}, bias, std::span(out).first(outputs));
  };
  product({kFirst}, 2 * kSize, 2, 2 * kSize, kSize);
  EXPECT_ERROR(std::invalid_argument, product({}, 2 * kSize, 2, 2 * kSize));
  EXPECT_ERROR(std::invalid_argument, product({kFirst}, 0, 0, 0));
  EXPECT_ERROR(std::invalid_argument, product({kFirst}, 0, 2, 2 * kSize));
  EXPECT_ERROR(std::invalid_argument, product({kFirst}, 2 * kSize - 1, 2, 2 * kSize));
  EXPECT_ERROR(std::invalid_argument, product({kFirst}, 2 * kSize, 1, 2 * kSize));
  for (const uint64_t outputs : {2 * kSize - 1, 2 * kSize + 1, 2 * kSize + 2, 4 * kSize}) {
    EXPECT_ERROR(std::invalid_argument, product({kFirst}, 2 * kSize, 2, outputs));
  }
  EXPECT_ERROR(std::invalid_argument, product({kFirst, kSecond}, 2 * kSize, 2, 2 * kSize));
  EXPECT_ERROR(std::invalid_argument, product({kFirst}, 2 * kSize, 2, 2 * kSize, kSize - 1));
  EXPECT_ERROR(std::invalid_argument, product({kFirst, kSecond}, 2 * kSize, 2, 4 * kSize, kSize));
  EXPECT_ERROR(std::logic_error, product({kExpert}, 2 * kSize, 2, 2 * kSize));  // not handed out
  EXPECT_ERROR(std::out_of_range, product({99}, 2 * kSize, 2, 2 * kSize));
}

// One step of attention with a cache of its own.
struct Attention {
  AttentionLayer layer{.query = {{kFirst}, {}},
                       .key = {{kSecond}, {}},
                       .value = {{kFirst}, {}},
                       .output = {{kSecond}, {}},
                       .shape = {2, 2, 16, 0.25f},
                       .query_norm = {},
                       .key_norm = {}};
  uint64_t rows = 2;
  uint64_t sequences = 2;
  uint64_t query_tokens = 1;
  uint64_t values = 2 * kSize;
  uint64_t outputs = 2 * kSize;
  uint64_t length = 0;
  uint64_t capacity = 3;
  uint64_t rotated = 0;
  Words x = gaussian(2 * kSize, 4);
  Words keys = Words(2 * 3 * kSize);  // for three positions
  Words cached_values = keys;
  Words out = Words(2 * kSize + 1);
  Words angles = Words(64);

  void run(Engine& engine) {
    engine.attention_step(layer, {std::span(x).first(values), rows}, sequences, query_tokens,
                          {angles.data(), angles.data(), rotated, 0},
                          {keys.data(), cached_values.data(), length, capacity}, std::span(out).first(outputs));
  }
};

void test_attention_to_oneself_is_the_value() {
  Loaded loaded;
  Attention step;
  step.run(loaded.engine);
  const Words value = multiplied(loaded.engine, {kFirst}, step.x, 2);
  const Words key = multiplied(loaded.engine, {kSecond}, step.x, 2);
  step.out.resize(step.outputs);
  CHECK(step.out == multiplied(loaded.engine, {kSecond}, value, 2));
  for (uint64_t row = 0; row < 2; ++row) {
    for (uint64_t head = 0; head < 2; ++head) {
      const auto from = static_cast<ptrdiff_t>(row * kSize + head * 16);
      const auto to = static_cast<ptrdiff_t>((row * 2 + head) * step.capacity * 16);
      CHECK(std::equal(value.begin() + from, value.begin() + from + 16, step.cached_values.begin() + to));
      CHECK(std::equal(key.begin() + from, key.begin() + from + 16, step.keys.begin() + to));
    }
  }
}

// Two tokens of one sequence: the first one attends to itself alone, and in two calls there is the same cache.
void test_attention_of_a_prompt() {
  if (simd::prompt_attention(best_instruction_set()) == nullptr) return;
  Loaded loaded;
  Attention prompt;
  prompt.sequences = 1;
  prompt.query_tokens = 2;
  prompt.rotated = 16;
  for (uint64_t i = 0; i < 32; ++i) prompt.angles[i] = float_to_bfloat16(0.5f);
  Attention first = prompt;
  prompt.run(loaded.engine);

  prompt.out.resize(prompt.outputs);
  first.rows = first.query_tokens = 1;
  first.values = first.outputs = kSize;
  first.run(loaded.engine);
  CHECK(std::equal(first.out.begin(), first.out.begin() + kSize, prompt.out.begin()));

  Attention last = prompt;
  last.query_tokens = 1;
  last.outputs = kSize;
  last.keys = last.cached_values = Words(prompt.keys.size());
  last.run(loaded.engine);
  CHECK(std::equal(last.out.begin(), last.out.begin() + kSize, prompt.out.begin() + kSize));
  CHECK(last.keys == prompt.keys && last.cached_values == prompt.cached_values);

  prompt.length = 1;
  EXPECT_ERROR(std::invalid_argument, prompt.run(loaded.engine));
}

void test_attention_of_another_shape_is_refused() {
  Loaded loaded;
  const std::vector<std::function<void(Attention&)>> changes = {
      [](Attention& step) { step.rows = 0; },
      [](Attention& step) { step.sequences = 0; },
      [](Attention& step) { step.sequences = 3; },
      [](Attention& step) { step.query_tokens = 0; },
      [](Attention& step) { step.query_tokens = 2; },
      [](Attention& step) { step.values = 0; },
      [](Attention& step) { step.values = 2 * kSize - 1; },  // not whole rows
      [](Attention& step) { step.values = 2 * kSize - 2; },  // of another length
      [](Attention& step) { step.outputs = 2 * kSize - 1; },
      [](Attention& step) { step.outputs = 2 * kSize + 1; },
      [](Attention& step) { step.outputs = kSize; },
      [](Attention& step) { step.layer.query.blocks = {kFirst, kSecond}; },  // twice the rows
      [](Attention& step) { step.layer.key.blocks = {kFirst, kSecond}; },
      [](Attention& step) { step.layer.value.blocks = {kFirst, kSecond}; },
      [](Attention& step) { step.layer.output.blocks = {kFirst, kSecond}; },
      [](Attention& step) { step.layer.query.blocks = {}; },
      [](Attention& step) { step.layer.output.blocks = {}; },
      [](Attention& step) { step.layer.key.bias = std::span(step.x).first(kSize - 1); },
      [](Attention& step) { step.layer.shape.query_heads = 4; },      // more than the queries have
      [](Attention& step) { step.layer.shape.key_value_heads = 1; },  // fewer than the keys have
      [](Attention& step) { step.layer.shape = {3, 2, 16, 0.25f}; },
      [](Attention& step) { step.layer.shape = {4, 4, 8, 0.25f}; },
      [](Attention& step) { step.layer.shape = {2, 0, 16, 0.25f}; },
      [](Attention& step) { step.length = step.capacity; },
      [](Attention& step) { step.capacity = 0; },
      [](Attention& step) { step.rotated = 15; },
      [](Attention& step) { step.rotated = 18; },
  };
  for (const auto& change : changes) {
    Attention step;
    change(step);
    EXPECT_ERROR(std::invalid_argument, step.run(loaded.engine));
  }
  Attention expert;
  expert.layer.value.blocks = {kExpert};
  EXPECT_ERROR(std::logic_error, expert.run(loaded.engine));
  Attention last;
  last.length = 2;
  last.run(loaded.engine);  // there is room for one
  loaded.engine.close();
  EXPECT_ERROR(std::logic_error, last.run(loaded.engine));
}

struct FeedForward {
  DenseNetwork network{.gate = {{kFirst}, {}}, .up = {{kSecond}, {}}, .down = {{kFirst}, {}}, .activation = {}};
  uint64_t rows = 3;
  uint64_t values = 3 * kSize;
  uint64_t outputs = 3 * kSize;
  Words x = gaussian(3 * kSize, 5);
  Words out = Words(3 * kSize + 1);

  void run(Engine& engine) {
    engine.feed_forward_step(network, {std::span(x).first(values), rows}, std::span(out).first(outputs));
  }
};

void test_rows_of_a_network_do_not_depend_on_each_other() {
  Loaded loaded;
  FeedForward together;
  together.run(loaded.engine);
  CHECK(std::ranges::any_of(together.out, [](uint16_t word) { return word != 0; }));
  for (uint64_t row = 0; row < 3; ++row) {
    FeedForward alone;
    alone.rows = 1;
    alone.values = alone.outputs = kSize;
    alone.x.erase(alone.x.begin(), alone.x.begin() + static_cast<ptrdiff_t>(row * kSize));
    alone.run(loaded.engine);
    CHECK(std::equal(alone.out.begin(), alone.out.begin() + kSize,
                     together.out.begin() + static_cast<ptrdiff_t>(row * kSize)));
  }
}

void test_networks_of_another_shape_are_refused() {
  Loaded loaded;
  const std::vector<std::function<void(FeedForward&)>> changes = {
      [](FeedForward& step) { step.rows = 0; },
      [](FeedForward& step) { step.values = 0; },
      [](FeedForward& step) { step.values = 3 * kSize - 1; },
      [](FeedForward& step) { step.values = 3 * kSize - 3; },
      [](FeedForward& step) { step.outputs = 3 * kSize - 1; },
      [](FeedForward& step) { step.outputs = 3 * kSize + 1; },
      [](FeedForward& step) { step.outputs = 2 * kSize; },
      [](FeedForward& step) { step.network.gate.blocks = {kFirst, kSecond}; },
      [](FeedForward& step) { step.network.up.blocks = {kFirst, kSecond}; },
      [](FeedForward& step) { step.network.down.blocks = {kFirst, kSecond}; },
      [](FeedForward& step) { step.network.gate.blocks = {}; },
      [](FeedForward& step) { step.network.up.blocks = {}; },
      [](FeedForward& step) { step.network.down.blocks = {}; },
      [](FeedForward& step) { step.network.up.bias = std::span(step.x).first(kSize + 1); },
  };
  for (const auto& change : changes) {
    FeedForward step;
    change(step);
    EXPECT_ERROR(std::invalid_argument, step.run(loaded.engine));
  }
  FeedForward expert;
  expert.network.gate.blocks = {kExpert};
  EXPECT_ERROR(std::logic_error, expert.run(loaded.engine));
  FeedForward intact;
  intact.run(loaded.engine);
  Loaded taller({48, kSize});  // down has not the columns that gate and up have rows
  EXPECT_ERROR(std::invalid_argument, FeedForward().run(taller.engine));
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_a_matrix_of_several_blocks_is_their_products_side_by_side();
  zipmoe::test_products_of_another_shape_are_refused();
  zipmoe::test_attention_to_oneself_is_the_value();
  zipmoe::test_attention_of_a_prompt();
  zipmoe::test_attention_of_another_shape_is_refused();
  zipmoe::test_rows_of_a_network_do_not_depend_on_each_other();
  zipmoe::test_networks_of_another_shape_are_refused();
  std::puts("engine_steps_test: ok");
  return 0;
}
