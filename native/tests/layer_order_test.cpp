// The order of a request's reads and decompressions, against the scheduler's own timeline.
#include <random>
#include <set>
#include <tuple>

#include "runtime/layer_order.hpp"
#include "schedule/simulation.hpp"
#include "tests/engine_test_support.hpp"

namespace zipmoe {
namespace {

constexpr ReadRates kRates = {.read_bytes_per_second = 1e9, .decode_bytes_per_second = 2e9};

ExpertWork expert(Residency residency, uint32_t tokens, uint32_t shards, uint32_t tensors = 2) {
  ExpertWork work{.residency = residency, .tokens = tokens, .tensors = {}};
  for (uint32_t tensor = 0; tensor < tensors; ++tensor) {
    work.tensors.push_back(
        {.exponent_bytes = 40000, .sign_mantissa_bytes = 100000, .weights = 100000, .shards = shards});
  }
  return work;
}

std::vector<ExpertWork> random_layer(std::mt19937& generator, uint32_t shards) {
  std::vector<ExpertWork> experts;
  const uint32_t count = 1 + generator() % 12;
  for (uint32_t i = 0; i < count; ++i) {
    experts.push_back(expert(static_cast<Residency>(generator() % 5), 1 + generator() % 4, shards));
  }
  return experts;
}

// All tensors of these layers are alike, so the layer that the scheduler sees can be built independently.
Layer layer_of(const std::vector<ExpertWork>& experts, uint32_t shards, uint32_t workers) {
  std::vector<Task> tasks;
  std::vector<Picoseconds> execute;
  for (uint32_t i = 0; i < experts.size(); ++i) {
    for (uint32_t tensor = 0; tensor < experts[i].tensors.size(); ++tensor) {
      tasks.push_back({.expert = i,
                       .tensor = tensor,
                       .residency = experts[i].residency,
                       .costs = {.read_sign_mantissa = to_picoseconds(100000 / 1e9),
                                 .read_shard = to_picoseconds(40000.0 / shards / 1e9),
                                 .decompress_shard = to_picoseconds(200000.0 * workers / shards / 2e9)}});
    }
    execute.push_back(Picoseconds{1'000'000} * experts[i].tokens);
  }
  return Layer(std::move(tasks), std::move(execute), ChunkLayout::separable(shards), workers);
}

void test_the_order_is_the_schedulers() {
  std::mt19937 generator(1);
  for (const OrderKind kind : {OrderKind::cache_affinity, OrderKind::fifo}) {
    for (int round = 0; round < 300; ++round) {
      const uint32_t shards = 1U << (generator() % 4);
      const uint32_t workers = 1U << (generator() % 3);
      const std::vector<ExpertWork> experts = random_layer(generator, shards);
      const LayerOrder order = layer_order(experts, ChunkLayout::separable(shards), workers, kRates, kind);
      const Layer layer = layer_of(experts, shards, workers);
      const Timeline timeline = simulate(layer, task_order(layer, kind));

      std::vector<ShardTask> expected;
      for (const Decompression& job : timeline.decompressions) {
        const Task& task = layer.tasks()[job.task];
        expected.push_back({task.expert, task.tensor, job.shard});
      }
      CHECK(order.decompressions == expected);

      // Reads of tensors become reads of extents, at the place of the first one.
      std::vector<std::pair<uint32_t, uint32_t>> extents;
      std::set<std::pair<uint32_t, uint32_t>> seen;
      for (const Read& read : timeline.reads) {
        const std::pair extent{layer.tasks()[read.task].expert, read.kind == OperationKind::read_exponent ? 0U : 1U};
        if (seen.insert(extent).second) extents.push_back(extent);
      }
      std::vector<std::pair<uint32_t, uint32_t>> found;
      for (const PartRead& read : order.reads) {
        CHECK(read.parts[0] || read.parts[1]);
        for (uint32_t part = 0; part < 2; ++part) {
          if (read.parts[part]) found.emplace_back(read.expert, part);
        }
      }
      CHECK(found == extents);
      for (size_t i = 1; i < order.reads.size(); ++i) CHECK(order.reads[i].expert != order.reads[i - 1].expert);
    }
  }
}

void test_parts_are_read_apart_where_the_schedule_says_so() {
  // A missing expert is one read; E-chunks of an expert in S are read while it waits for its SM-chunks.
  const ChunkLayout layout = ChunkLayout::separable(2);
  const auto reads = [&](std::vector<ExpertWork> experts, uint32_t workers) {
    return layer_order(experts, layout, workers, kRates, OrderKind::cache_affinity).reads;
  };
  CHECK(reads({expert(Residency::miss, 1, 2)}, 2) == (std::vector<PartRead>{{0, {true, true}}}));
  CHECK(reads({expert(Residency::exponent, 1, 2)}, 2) == (std::vector<PartRead>{{0, {false, true}}}));
  CHECK(reads({expert(Residency::sign_mantissa, 1, 2)}, 2) == (std::vector<PartRead>{{0, {true, false}}}));
  CHECK(reads({expert(Residency::both_chunks, 1, 2), expert(Residency::full, 1, 2)}, 2).empty());
  const std::vector<PartRead> apart =
      layer_order(std::vector{expert(Residency::miss, 2, 2, 1), expert(Residency::sign_mantissa, 1, 2, 1)}, layout, 2,
                  {.read_bytes_per_second = 1e9, .decode_bytes_per_second = 1e12}, OrderKind::cache_affinity)
          .reads;
  CHECK(apart == (std::vector<PartRead>{{0, {true, false}}, {1, {true, false}}, {0, {false, true}}}));
}

void test_a_codec_without_parts() {
  std::vector<ExpertWork> experts;
  for (const Residency residency : {Residency::miss, Residency::both_chunks, Residency::full, Residency::miss}) {
    experts.push_back({.residency = residency,
                       .tokens = static_cast<uint32_t>(1 + experts.size()),
                       .tensors = {{.sign_mantissa_bytes = 1000, .weights = 700, .shards = 0}}});
  }
  const LayerOrder order = layer_order(experts, ChunkLayout::fused(), 2, kRates, OrderKind::cache_affinity);
  CHECK(order.reads == (std::vector<PartRead>{{3, {true, false}}, {0, {true, false}}}));  // more tokens come first
  CHECK(order.decompressions.empty());
  const LayerOrder ascending = ascending_order(experts, ChunkLayout::fused());
  CHECK(ascending.reads == (std::vector<PartRead>{{0, {true, false}}, {1, {true, false}}, {3, {true, false}}}));
  CHECK(ascending.decompressions.empty());
  CHECK(layer_order({}, ChunkLayout::fused(), 1, kRates, OrderKind::fifo).reads.empty());
}

void test_ascending_order_goes_from_expert_to_expert() {
  const std::vector<ExpertWork> experts = {expert(Residency::both_chunks, 1, 2, 1), expert(Residency::full, 9, 2, 1),
                                           expert(Residency::miss, 5, 2, 1)};
  const LayerOrder order = ascending_order(experts, ChunkLayout::separable(2));
  CHECK(order.reads == (std::vector<PartRead>{{0, {true, true}}, {2, {true, true}}}));
  CHECK(order.decompressions == (std::vector<ShardTask>{{0, 0, 0}, {0, 0, 1}, {2, 0, 0}, {2, 0, 1}}));
}

void test_absurd_rates_are_borne() {
  const std::vector<ExpertWork> experts(60, expert(Residency::miss, 1, 4, 3));
  for (const ReadRates rates : {ReadRates{1e-30, 1e-30}, ReadRates{1e30, 1e-30}, ReadRates{1e30, 1e30}}) {
    const LayerOrder order = layer_order(experts, ChunkLayout::separable(4), 6, rates, OrderKind::cache_affinity);
    CHECK(order.decompressions.size() == 60 * 3 * 4);
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_the_order_is_the_schedulers();
  zipmoe::test_parts_are_read_apart_where_the_schedule_says_so();
  zipmoe::test_a_codec_without_parts();
  zipmoe::test_ascending_order_goes_from_expert_to_expert();
  zipmoe::test_absurd_rates_are_borne();
  std::puts("layer_order_test: ok");
  return 0;
}
