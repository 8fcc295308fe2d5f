// One sparse layer's work of one step: the input of every order and of the simulation.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/residency.hpp"

namespace zipmoe {

// Whole picoseconds: sums and comparisons are exact, so a schedule does not depend on the order of additions.
using Picoseconds = int64_t;

// Throws std::invalid_argument unless `seconds` is finite, not negative and below 10^5.
Picoseconds to_picoseconds(double seconds);
double to_seconds(Picoseconds duration);

struct TaskCosts {
  Picoseconds read_sign_mantissa = 0;  // u; of a fused codec: the packed section
  Picoseconds read_shard = 0;          // rho * u / K
  Picoseconds decompress_shard = 0;    // c
  Picoseconds recombine = 0;
};

// The reconstruction of one tensor of one expert.
struct Task {
  uint32_t expert;  // position among the layer's experts in ascending order of their ids
  uint32_t tensor;
  Residency residency;
  TaskCosts costs;
};

class Layer {
 public:
  // `execute`: p per expert position. Throws std::invalid_argument for no worker, an expert position out of range, an
  // expert without a task, a tensor given twice, or a residency that the layout cannot hold. Costs of operations that a
  // task does not need are ignored.
  Layer(std::vector<Task> tasks, std::vector<Picoseconds> execute, ChunkLayout layout, uint32_t workers);

  std::span<const Task> tasks() const { return tasks_; }
  std::span<const RemainingWork> work() const { return work_; }
  std::span<const Picoseconds> execute() const { return execute_; }
  const ChunkLayout& layout() const { return layout_; }
  uint32_t shards() const { return layout_.shards(); }
  uint32_t workers() const { return workers_; }

 private:
  std::vector<Task> tasks_;
  std::vector<RemainingWork> work_;
  std::vector<Picoseconds> execute_;
  ChunkLayout layout_;
  uint32_t workers_;
};

// An order of everything: tasks in order, cut into blocks. Within a block all E reads come before all SM reads, within
// a kind reads follow the order of the tasks, as do the priorities of the decompressions.
struct TaskOrder {
  std::vector<uint32_t> tasks;       // every task that has work, once
  std::vector<uint32_t> block_ends;  // ascending positions in `tasks`; the last one is its size
};

// max(total I/O, total decompression / L, total recombination and execution, longest chain): no schedule is shorter.
Picoseconds lower_bound(const Layer& layer);
Picoseconds total_read_time(const Layer& layer);

}  // namespace zipmoe
