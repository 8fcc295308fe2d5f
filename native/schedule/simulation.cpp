#include "schedule/simulation.hpp"

#include <algorithm>
#include <tuple>

namespace zipmoe {
namespace {

// Lays the reads of all blocks out on the I/O server, and the shards into lanes. `ready` per task: end of its SM read.
ShardLanes run_reads(const Layer& layer, const TaskOrder& order, std::vector<Picoseconds>& ready, Timeline* timeline) {
  const OperationKind last_kind =
      layer.layout().is_fused() ? OperationKind::read_packed : OperationKind::read_sign_mantissa;
  ShardLanes lanes;
  lanes.read.reserve(order.tasks.size());
  lanes.resident.reserve(order.tasks.size());
  Picoseconds now = 0;
  uint32_t begin = 0;
  for (const uint32_t end : order.block_ends) {
    for (uint32_t position = begin; position < end; ++position) {
      const uint32_t task = order.tasks[position];
      const TaskCosts& costs = layer.tasks()[task].costs;
      const RemainingWork& work = layer.work()[task];
      if (!work.decompress) continue;
      if (!work.read_exponent) {
        lanes.resident.push_back({position, 0, 0, costs.decompress_shard});
        continue;
      }
      lanes.read.push_back({position, now + costs.read_shard, costs.read_shard, costs.decompress_shard});
      if (timeline != nullptr) {
        for (uint32_t shard = 0; shard < layer.shards(); ++shard) {
          const Picoseconds start = now + Picoseconds{shard} * costs.read_shard;
          timeline->reads.push_back({task, OperationKind::read_exponent, shard, {start, start + costs.read_shard}});
        }
      }
      now += Picoseconds{layer.shards()} * costs.read_shard;
    }
    for (uint32_t position = begin; position < end; ++position) {
      const uint32_t task = order.tasks[position];
      if (!layer.work()[task].read_sign_mantissa) continue;
      const Picoseconds start = now;
      now += layer.tasks()[task].costs.read_sign_mantissa;
      ready[task] = now;
      if (timeline != nullptr) timeline->reads.push_back({task, last_kind, 0, {start, now}});
    }
    begin = end;
  }
  if (timeline != nullptr) timeline->io_end = now;
  return lanes;
}

// The execution resource. `ready` per task: when all its parts are in memory. Returns the end of the last execution.
Picoseconds run_executions(const Layer& layer, const TaskOrder& order, const std::vector<Picoseconds>& ready,
                           Timeline* timeline) {
  struct Available {
    Picoseconds at;
    uint32_t index;  // of a task or an expert
  };
  std::vector<uint32_t> tasks_left(layer.execute().size(), 0);
  std::vector<Available> recombinations;
  recombinations.reserve(order.tasks.size());
  for (const uint32_t task : order.tasks) {
    recombinations.push_back({ready[task], task});
    ++tasks_left[layer.tasks()[task].expert];
  }
  std::sort(recombinations.begin(), recombinations.end(), [&layer](const Available& a, const Available& b) {
    if (a.at != b.at) return a.at < b.at;
    const Task& left = layer.tasks()[a.index];
    const Task& right = layer.tasks()[b.index];
    return std::tie(left.expert, left.tensor) < std::tie(right.expert, right.tensor);
  });
  std::vector<Available> executions;  // filled in the order in which experts become complete
  executions.reserve(layer.execute().size());
  for (uint32_t expert = 0; expert < tasks_left.size(); ++expert) {
    if (tasks_left[expert] == 0) executions.push_back({0, expert});
  }

  Picoseconds now = 0;
  size_t next_recombination = 0;
  size_t next_execution = 0;
  while (next_recombination < recombinations.size() || next_execution < executions.size()) {
    const bool execute =
        next_execution < executions.size() && (next_recombination == recombinations.size() ||
                                               executions[next_execution].at <= recombinations[next_recombination].at);
    const Available job = execute ? executions[next_execution++] : recombinations[next_recombination++];
    const Picoseconds start = std::max(now, job.at);
    if (execute) {
      now = start + layer.execute()[job.index];
      if (timeline != nullptr) timeline->executions[job.index] = {start, now};
      continue;
    }
    now = start + (layer.work()[job.index].recombine ? layer.tasks()[job.index].costs.recombine : 0);
    if (timeline != nullptr) timeline->recombinations[job.index] = {start, now};
    const uint32_t expert = layer.tasks()[job.index].expert;
    if (--tasks_left[expert] == 0) executions.push_back({now, expert});
  }
  return now;
}

Picoseconds run(const Layer& layer, const TaskOrder& order, Timeline* timeline) {
  std::vector<Picoseconds> ready(layer.tasks().size(), 0);
  const ShardLanes lanes = run_reads(layer, order, ready, timeline);
  DecompressionWorkers workers(layer.workers());
  const uint32_t shards = layer.shards();
  if (timeline == nullptr) {
    run_decompressions(lanes, shards, workers,
                       [&](uint32_t position, uint32_t, uint32_t, Picoseconds, Picoseconds end) {
                         Picoseconds& task_ready = ready[order.tasks[position]];
                         task_ready = std::max(task_ready, end);
                       });
    return run_executions(layer, order, ready, nullptr);
  }
  timeline->recombinations.resize(layer.tasks().size());
  timeline->executions.resize(layer.execute().size());
  std::vector<uint32_t> first_decompression(order.tasks.size(), 0);  // per position
  uint32_t decompressions = 0;
  for (uint32_t position = 0; position < order.tasks.size(); ++position) {
    first_decompression[position] = decompressions;
    if (layer.work()[order.tasks[position]].decompress) decompressions += shards;
  }
  timeline->decompressions.resize(decompressions);
  run_decompressions(lanes, shards, workers,
                     [&](uint32_t position, uint32_t shard, uint32_t worker, Picoseconds start, Picoseconds end) {
                       const uint32_t task = order.tasks[position];
                       ready[task] = std::max(ready[task], end);
                       timeline->decompressions[first_decompression[position] + shard] = {
                           task, shard, worker, {start, end}};
                     });
  timeline->makespan = run_executions(layer, order, ready, timeline);
  return timeline->makespan;
}

}  // namespace

void DecompressionWorkers::reset() {
  for (uint32_t worker = 0; worker < queue_.size(); ++worker) queue_[worker] = {0, 0, worker};
  head_ = 0;
}

Timeline simulate(const Layer& layer, const TaskOrder& order) {
  Timeline timeline;
  run(layer, order, &timeline);
  return timeline;
}

Picoseconds makespan(const Layer& layer, const TaskOrder& order) { return run(layer, order, nullptr); }

}  // namespace zipmoe
