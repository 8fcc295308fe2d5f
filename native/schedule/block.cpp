#include "schedule/block.hpp"

#include <algorithm>
#include <utility>

namespace zipmoe {
namespace {

// Both ascending: does nobody idle longer than before?
bool dominated(const std::vector<Picoseconds>& after, const std::vector<Picoseconds>& before) {
  return std::equal(after.begin(), after.end(), before.begin(), [](Picoseconds a, Picoseconds b) { return a <= b; });
}

}  // namespace

bool precedes(const Layer& layer, uint32_t a, uint32_t b) {
  const Task& left = layer.tasks()[a];
  const Task& right = layer.tasks()[b];
  const Picoseconds left_execute = layer.execute()[left.expert];
  const Picoseconds right_execute = layer.execute()[right.expert];
  if (left_execute != right_execute) return left_execute > right_execute;
  if (left.expert != right.expert) return left.expert < right.expert;
  return left.tensor < right.tensor;
}

Block::Block(const Layer& layer, uint32_t base) : layer_(&layer), base_(base), workers_(layer.workers()) {
  uniform_ = with(base);
  order_.push_back(base);
  io_end_ = costs(base).read_sign_mantissa;
  if (reads_exponent(base)) io_end_ += Picoseconds{layer.shards()} * costs(base).read_shard;
  if (layer.work()[base].decompress) decompression_ = Picoseconds{layer.shards()} * costs(base).decompress_shard;
  load_closed_form(uniform_, io_end_, load_);
}

Block::Uniform Block::with(uint32_t task) const {
  Uniform uniform = uniform_;
  if (!layer_->work()[task].decompress) return uniform;
  const TaskCosts& task_costs = costs(task);
  if (uniform.decompress < 0) uniform.decompress = task_costs.decompress_shard;
  if (uniform.decompress != task_costs.decompress_shard) uniform.applies = false;
  if (reads_exponent(task)) {
    if (uniform.read < 0) uniform.read = task_costs.read_shard;
    if (uniform.read != task_costs.read_shard) uniform.applies = false;
    uniform.read_shards += layer_->shards();
  } else {
    uniform.resident_shards += layer_->shards();
  }
  return uniform;
}

void Block::summarise(Picoseconds io_end, WorkerLoad& load) const {
  load.idle.clear();
  load.finish.clear();
  load.total_idle = 0;
  for (const DecompressionWorkers::Worker& worker : workers_.all()) {
    load.finish.push_back(worker.finish);
    load.idle.push_back(std::max(io_end, worker.finish) - worker.busy);
    load.total_idle += load.idle.back();
  }
  std::sort(load.idle.begin(), load.idle.end());
  std::sort(load.finish.begin(), load.finish.end());
}

// With shards of equal cost it does not matter which one a worker takes: the i-th shard to become ready is the i-th to
// be taken, by the worker that took the (i-L)-th. Its start is max(start(i-L) + c, ready(i)), with ready(i) = 0 for the
// R resident shards and (i-R) r for the others. Unrolled along one worker this is a maximum over a convex function of
// the shard at which the worker last waited, so it is attained at the worker's first shard or at the shard itself.
void Block::load_closed_form(const Uniform& uniform, Picoseconds io_end, WorkerLoad& load) const {
  const auto workers = static_cast<int64_t>(layer_->workers());
  const int64_t shards = uniform.resident_shards + uniform.read_shards;
  const auto ready = [&uniform](int64_t shard) {
    return shard < uniform.resident_shards ? 0 : (shard - uniform.resident_shards + 1) * uniform.read;
  };
  load.idle.resize(static_cast<size_t>(workers));
  load.finish.resize(static_cast<size_t>(workers));
  load.total_idle = 0;
  for (int64_t worker = 0; worker < workers; ++worker) {
    Picoseconds finish = 0;
    Picoseconds busy = 0;
    if (worker < shards) {
      const int64_t earlier = (shards - 1 - worker) / workers;  // shards of this worker before its last one
      const Picoseconds start =
          std::max(ready(worker) + earlier * uniform.decompress, ready(worker + earlier * workers));
      finish = start + uniform.decompress;
      busy = (earlier + 1) * uniform.decompress;
    }
    const Picoseconds idle = std::max(io_end, finish) - busy;
    load.idle[static_cast<size_t>(worker)] = idle;
    load.finish[static_cast<size_t>(worker)] = finish;
    load.total_idle += idle;
  }
  std::sort(load.idle.begin(), load.idle.end());
  std::sort(load.finish.begin(), load.finish.end());
}

void Block::load_simulated(uint32_t task, size_t position, Picoseconds io_end, WorkerLoad& load) {
  lanes_.read.clear();
  lanes_.resident.clear();
  Picoseconds now = 0;
  uint32_t priority = 0;
  const auto add = [&](uint32_t added) {
    const TaskCosts& added_costs = costs(added);
    if (reads_exponent(added)) {
      lanes_.read.push_back(
          {priority, now + added_costs.read_shard, added_costs.read_shard, added_costs.decompress_shard});
      now += Picoseconds{layer_->shards()} * added_costs.read_shard;
    } else if (layer_->work()[added].decompress) {
      lanes_.resident.push_back({priority, 0, 0, added_costs.decompress_shard});
    }
    ++priority;
  };
  for (size_t i = 0; i < order_.size(); ++i) {
    if (i == position) add(task);
    add(order_[i]);
  }
  if (position == order_.size()) add(task);
  workers_.reset();
  run_decompressions(lanes_, layer_->shards(), workers_, [](uint32_t, uint32_t, uint32_t, Picoseconds, Picoseconds) {});
  summarise(io_end, load);
}

bool Block::same_shards(uint32_t a, uint32_t b) const {
  return costs(a).decompress_shard == costs(b).decompress_shard && reads_exponent(a) == reads_exponent(b) &&
         (!reads_exponent(a) || costs(a).read_shard == costs(b).read_shard);
}

bool Block::compute_bound() const {
  const size_t most = std::min<size_t>(layer_->workers(), layer_->shards());
  for (size_t l = 1; l <= most; ++l) {
    if (load_.finish[l - 1] - io_end_ >= static_cast<Picoseconds>(l) * costs(base_).read_shard) return true;
  }
  return false;
}

// Type-II tasks come in sorted order, so all those of the block precede the new one.
size_t Block::fallback_position(uint32_t task) const {
  for (size_t position = order_.size(); position > 0; --position) {
    if (order_[position - 1] != base_) return position;
  }
  return precedes(*layer_, base_, task) ? 1 : 0;
}

void Block::insert(uint32_t task) {
  const Picoseconds shards = layer_->shards();
  const Picoseconds io_end = io_end_ + (reads_exponent(task) ? shards * costs(task).read_shard : 0);
  const Picoseconds decompression = decompression_ + shards * costs(task).decompress_shard;
  const Uniform uniform = with(task);
  size_t position = order_.size() + 1;  // none
  bool candidate_is_current = false;    // candidate_ is the load with the task at `position`
  if (uniform.applies) {
    // The position changes nothing about the workers' times: it is the first one or none.
    load_closed_form(uniform, io_end, candidate_);
    if (dominated(candidate_.idle, load_.idle)) position = 0;
    candidate_is_current = true;
  } else if (Picoseconds{layer_->workers()} * io_end - decompression <= load_.total_idle) {
    // Otherwise the workers together gain idle time at every position, hence one of them does.
    for (size_t i = 0; i <= order_.size(); ++i) {
      if (i > 0 && same_shards(order_[i - 1], task)) continue;  // the same sequence of shards as one position earlier
      load_simulated(task, i, io_end, candidate_);
      if (dominated(candidate_.idle, load_.idle)) {
        position = i;
        candidate_is_current = true;
        break;
      }
    }
  }
  if (position > order_.size()) {
    position = fallback_position(task);
    if (!candidate_is_current) load_simulated(task, position, io_end, candidate_);
  }
  order_.insert(order_.begin() + static_cast<std::ptrdiff_t>(position), task);
  std::swap(load_, candidate_);
  io_end_ = io_end;
  decompression_ = decompression;
  uniform_ = uniform;
}

}  // namespace zipmoe
