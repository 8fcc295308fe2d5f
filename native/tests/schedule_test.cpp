// The scheduler without Python: every order is complete and feasible, the closed form of a block equals its simulation,
// bad layers are refused. Meant to run under the address and undefined-behaviour sanitizers.
#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "schedule/block.hpp"
#include "schedule/scheduler.hpp"
#include "schedule/simulation.hpp"

namespace zipmoe {
namespace {

using Random = std::mt19937;

int64_t below(Random& random, int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); }

template <typename Action>
void assert_refused(const Action& action) {
  bool refused = false;
  try {
    action();
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  assert(refused);
}

Layer random_layer(Random& random, bool fused) {
  const bool one_size = below(random, 2) == 0;
  const auto experts = static_cast<uint32_t>(below(random, 12) + 1);
  const auto costs = [&random] {
    return TaskCosts{below(random, 20), below(random, 8), below(random, 20), below(random, 4)};
  };
  const TaskCosts common = costs();
  std::vector<Task> tasks;
  std::vector<Picoseconds> execute;
  for (uint32_t expert = 0; expert < experts; ++expert) {
    execute.push_back(below(random, 20));
    const auto tensors = static_cast<uint32_t>(below(random, 3) + 1);
    for (uint32_t tensor = 0; tensor < tensors; ++tensor) {
      constexpr Residency kFusedStates[] = {Residency::full, Residency::both_chunks, Residency::miss};
      const Residency residency = fused ? kFusedStates[below(random, 3)] : parse_residency(below(random, 5));
      tasks.push_back({expert, tensor, residency, one_size ? common : costs()});
    }
  }
  std::shuffle(tasks.begin(), tasks.end(), random);
  const ChunkLayout layout =
      fused ? ChunkLayout::fused() : ChunkLayout::separable(static_cast<uint32_t>(below(random, 6) + 1));
  return Layer(std::move(tasks), std::move(execute), layout, static_cast<uint32_t>(below(random, 6) + 1));
}

void assert_disjoint(std::vector<TimeSpan> spans) {
  std::erase_if(spans, [](const TimeSpan& span) { return span.start == span.end; });
  std::sort(spans.begin(), spans.end(), [](const TimeSpan& a, const TimeSpan& b) { return a.start < b.start; });
  for (size_t i = 1; i < spans.size(); ++i) assert(spans[i].start >= spans[i - 1].end);
}

void assert_feasible(const Layer& layer, const TaskOrder& order, const Timeline& timeline) {
  std::vector<int> times_ordered(layer.tasks().size(), 0);
  for (const uint32_t task : order.tasks) ++times_ordered[task];
  for (size_t task = 0; task < times_ordered.size(); ++task) assert(times_ordered[task] == layer.work()[task].any());
  assert(order.block_ends.empty() ? order.tasks.empty() : order.block_ends.back() == order.tasks.size());

  const size_t shards = layer.shards();
  std::vector<Picoseconds> shard_read(layer.tasks().size() * (shards + 1), 0);
  std::vector<Picoseconds> parts(layer.tasks().size(), 0);
  std::vector<TimeSpan> resource;
  size_t reads = 0;
  size_t decompressions = 0;
  for (const RemainingWork& work : layer.work()) {
    reads += (work.read_exponent ? shards : 0) + (work.read_sign_mantissa ? 1 : 0);
    decompressions += work.decompress ? shards : 0;
  }
  assert(timeline.reads.size() == reads && timeline.decompressions.size() == decompressions);
  for (const Read& read : timeline.reads) {
    resource.push_back(read.time);
    if (read.kind == OperationKind::read_exponent) {
      shard_read[read.task * shards + read.shard] = read.time.end;
    } else {
      parts[read.task] = read.time.end;
    }
  }
  assert_disjoint(resource);
  assert(timeline.io_end == total_read_time(layer));

  for (uint32_t worker = 0; worker < layer.workers(); ++worker) {
    resource.clear();
    for (const Decompression& job : timeline.decompressions) {
      assert(job.worker < layer.workers());
      if (job.worker == worker) resource.push_back(job.time);
    }
    assert_disjoint(resource);
  }
  for (const Decompression& job : timeline.decompressions) {
    assert(job.time.end - job.time.start == layer.tasks()[job.task].costs.decompress_shard);
    assert(job.time.start >= shard_read[job.task * shards + job.shard]);
    parts[job.task] = std::max(parts[job.task], job.time.end);
  }

  resource.assign(timeline.executions.begin(), timeline.executions.end());
  for (size_t task = 0; task < layer.tasks().size(); ++task) {
    const TimeSpan& span = timeline.recombinations[task];
    const bool recombine = layer.work()[task].recombine;
    assert(span.end - span.start == (recombine ? layer.tasks()[task].costs.recombine : 0));
    assert(!layer.work()[task].any() || span.start >= parts[task]);
    assert(timeline.executions[layer.tasks()[task].expert].start >= span.end);
    if (recombine) resource.push_back(span);
  }
  assert_disjoint(resource);
  assert(timeline.makespan >= lower_bound(layer));
  assert(timeline.makespan == makespan(layer, order));
}

void test_every_order_is_complete_and_feasible() {
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    const Layer layer = random_layer(random, round % 5 == 0);
    for (const OrderKind kind : {OrderKind::cache_affinity, OrderKind::fifo}) {
      const TaskOrder order = task_order(layer, kind);
      assert_feasible(layer, order, simulate(layer, order));
    }
  }
}

// Equal costs take the closed form. A chunk in memory that takes no time to decompress leaves every load as it is, but
// sends the block through the simulation.
void test_closed_form_equals_simulation() {
  Random random(2);
  for (int round = 0; round < 2000; ++round) {
    constexpr Picoseconds kScale = 1'000'000'000;
    const TaskCosts costs{(below(random, 20) + 1) * kScale, (below(random, 8) + 1) * kScale,
                          (below(random, 20) + 1) * kScale, kScale};
    const auto shards = static_cast<uint32_t>(below(random, 5) + 1);
    const auto workers = static_cast<uint32_t>(below(random, 5) + 1);
    const Residency states[] = {Residency::both_chunks, Residency::sign_mantissa};
    std::vector<Task> tasks{{0, 0, below(random, 2) == 0 ? Residency::miss : Residency::exponent, costs}};
    std::vector<Picoseconds> execute{below(random, 100)};
    for (uint32_t expert = 1; expert < 12; ++expert) {
      tasks.push_back({expert, 0, states[below(random, 2)], costs});
      execute.push_back(below(random, 100));
    }
    const Layer uniform(tasks, execute, ChunkLayout::separable(shards), workers);
    Block closed(uniform, 0);
    tasks.push_back({12, 0, Residency::both_chunks, {}});
    execute.push_back(1000);
    const Layer mixed(tasks, execute, ChunkLayout::separable(shards), workers);
    Block simulated(mixed, 0);
    simulated.insert(12);
    for (uint32_t task = 1; task < 12; ++task) {
      assert(closed.compute_bound() == simulated.compute_bound());
      closed.insert(task);
      simulated.insert(task);
    }
    assert(closed.compute_bound() == simulated.compute_bound());
  }
}

void test_workers_take_turns() {
  DecompressionWorkers workers(3);
  for (uint32_t i = 0; i < 3; ++i) {
    assert(workers.next().number == i && workers.next().finish == 0);
    assert(workers.take(0, 10 - 2 * i) == 10 - 2 * i);
  }
  assert(workers.next().number == 2 && workers.next().finish == 6);
  workers.take(6, 2);  // ends at 8, as worker 1 does, and has taken its shard later
  assert(workers.next().number == 1 && workers.next().finish == 8);
  workers.take(8, 1);
  assert(workers.next().number == 2 && workers.next().busy == 8);
}

void test_residencies() {
  assert(residency_of_chunks(true, true) == Residency::both_chunks);
  assert(residency_of_chunks(true, false) == Residency::exponent);
  assert(residency_of_chunks(false, true) == Residency::sign_mantissa);
  assert(residency_of_chunks(false, false) == Residency::miss);
  for (int code = 0; code < 5; ++code) {
    const Residency residency = parse_residency(code);
    if (residency == Residency::full) continue;
    assert(residency_of_chunks(holds_exponent(residency), holds_sign_mantissa(residency)) == residency);
  }
  assert_refused([] { parse_residency(5); });
  assert_refused([] { parse_residency(-1); });
  assert_refused([] { ChunkLayout::separable(0); });
  assert_refused([] { reconstruction_dag(Residency::sign_mantissa, ChunkLayout::fused()); });
  assert(reconstruction_dag(Residency::miss, ChunkLayout::separable(3)).size() == 3 + 3 + 1 + 1 + 1);
}

void test_bad_layers_are_refused() {
  const ChunkLayout two = ChunkLayout::separable(2);
  const Task task{0, 0, Residency::miss, {1, 1, 1, 1}};
  Layer({task}, {1}, two, 1);
  assert_refused([&] { Layer({task}, {1}, two, 0); });
  assert_refused([&] { Layer({task}, {1, 1}, two, 1); });
  assert_refused([&] { Layer({task, task}, {1}, two, 1); });
  assert_refused([&] { Layer({task}, {}, two, 1); });
  assert_refused([&] { Layer({{0, 0, Residency::exponent, {}}}, {1}, ChunkLayout::fused(), 1); });
  const Picoseconds longest = std::numeric_limits<Picoseconds>::max();
  assert_refused([&] { Layer({{0, 0, Residency::miss, {1, longest, longest, 1}}}, {longest}, two, 1); });
  assert_refused([] { to_picoseconds(-1e-12); });
  assert_refused([] { to_picoseconds(std::nan("")); });
  assert_refused([] { parse_order_kind("best"); });
  assert(to_picoseconds(1.5e-12) == 2 && to_seconds(to_picoseconds(0.1)) == 0.1);
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_residencies();
  zipmoe::test_workers_take_turns();
  zipmoe::test_every_order_is_complete_and_feasible();
  zipmoe::test_closed_form_equals_simulation();
  zipmoe::test_bad_layers_are_refused();
  std::puts("schedule_test: ok");
  return 0;
}
