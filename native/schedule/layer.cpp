#include "schedule/layer.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace zipmoe {
namespace {

constexpr double kPicosecondsPerSecond = 1e12;
constexpr double kLongestSeconds = 1e5;
constexpr uint32_t kMostWorkers = 4096;
constexpr uint32_t kMostShards = 65536;
// Half of what the type holds: no sum of a layer's durations overflows.
constexpr double kLongestLayerPicoseconds = 4.6e18;

// Bounded by its own term of the sum, whatever the work: an over-estimate is enough to exclude overflow.
double duration_bound(const Task& task, uint32_t shards) {
  const TaskCosts& costs = task.costs;
  return static_cast<double>(costs.read_sign_mantissa) + static_cast<double>(costs.recombine) +
         static_cast<double>(shards) *
             (static_cast<double>(costs.read_shard) + static_cast<double>(costs.decompress_shard));
}

}  // namespace

Picoseconds to_picoseconds(double seconds) {
  if (!(seconds >= 0 && seconds < kLongestSeconds)) {
    throw std::invalid_argument("a duration must be between 0 and 10^5 seconds, not " + std::to_string(seconds));
  }
  return std::llround(seconds * kPicosecondsPerSecond);
}

double to_seconds(Picoseconds duration) { return static_cast<double>(duration) / kPicosecondsPerSecond; }

Layer::Layer(std::vector<Task> tasks, std::vector<Picoseconds> execute, ChunkLayout layout, uint32_t workers)
    : tasks_(std::move(tasks)), execute_(std::move(execute)), layout_(layout), workers_(workers) {
  if (workers_ == 0 || workers_ > kMostWorkers) throw std::invalid_argument("the number of workers must be 1 to 4096");
  if (layout_.shards() > kMostShards) throw std::invalid_argument("the number of shards must be at most 65536");
  std::vector<std::pair<uint32_t, uint32_t>> names;
  names.reserve(tasks_.size());
  work_.reserve(tasks_.size());
  double total = 0;
  for (const Task& task : tasks_) {
    if (task.expert >= execute_.size())
      throw std::invalid_argument("a task names an expert that has no execution time");
    if (!layout_.can_hold(task.residency)) {
      throw std::invalid_argument("a fused codec's record has no chunks that could be held apart (states S and E)");
    }
    names.emplace_back(task.expert, task.tensor);
    work_.push_back(remaining_work(task.residency, layout_));
    total += duration_bound(task, layout_.shards());
  }
  for (const Picoseconds duration : execute_) total += static_cast<double>(duration);
  if (total > kLongestLayerPicoseconds) throw std::invalid_argument("the durations of a layer add up to too much");

  if (!std::is_sorted(names.begin(), names.end())) std::sort(names.begin(), names.end());
  if (std::adjacent_find(names.begin(), names.end()) != names.end()) {
    throw std::invalid_argument("a tensor of an expert is given twice");
  }
  size_t distinct_experts = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i == 0 || names[i].first != names[i - 1].first) ++distinct_experts;
  }
  if (distinct_experts != execute_.size()) throw std::invalid_argument("an expert with an execution time has no task");
}

Picoseconds total_read_time(const Layer& layer) {
  Picoseconds total = 0;
  for (size_t i = 0; i < layer.tasks().size(); ++i) {
    const TaskCosts& costs = layer.tasks()[i].costs;
    if (layer.work()[i].read_exponent) total += Picoseconds{layer.shards()} * costs.read_shard;
    if (layer.work()[i].read_sign_mantissa) total += costs.read_sign_mantissa;
  }
  return total;
}

Picoseconds lower_bound(const Layer& layer) {
  const Picoseconds shards = layer.shards();
  const Picoseconds workers = layer.workers();
  Picoseconds decompression = 0;
  Picoseconds execution = 0;
  Picoseconds longest_chain = 0;
  for (const Picoseconds duration : layer.execute()) execution += duration;
  for (size_t i = 0; i < layer.tasks().size(); ++i) {
    const Task& task = layer.tasks()[i];
    const RemainingWork& work = layer.work()[i];
    Picoseconds exponent_chain = 0;
    Picoseconds tail = layer.execute()[task.expert];
    if (work.read_exponent) exponent_chain += task.costs.read_shard;
    if (work.decompress) {
      exponent_chain += task.costs.decompress_shard;
      decompression += shards * task.costs.decompress_shard;
    }
    if (work.recombine) {
      execution += task.costs.recombine;
      tail += task.costs.recombine;
    }
    const Picoseconds read_chain = work.read_sign_mantissa ? task.costs.read_sign_mantissa : 0;
    longest_chain = std::max(longest_chain, std::max(exponent_chain, read_chain) + tail);
  }
  return std::max({total_read_time(layer), (decompression + workers - 1) / workers, execution, longest_chain});
}

}  // namespace zipmoe
