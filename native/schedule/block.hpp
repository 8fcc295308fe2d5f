// A block of the cache-affinity schedule under construction.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/layer.hpp"
#include "schedule/simulation.hpp"

namespace zipmoe {

// True if task `a` comes before `b`: longer execution first, then expert, then tensor.
bool precedes(const Layer& layer, uint32_t a, uint32_t b);

// How the workers spend a block that starts on an idle machine. Idle time of a worker: from the start of the block to
// the end of its reads, or to the end of the worker's last shard if that is later, less the time spent decompressing.
// Workers have no names, so both are sorted.
struct WorkerLoad {
  std::vector<Picoseconds> idle;    // ascending
  std::vector<Picoseconds> finish;  // ascending; 0 for a worker that took no shard
  Picoseconds total_idle = 0;
};

// One Type-I task and the Type-II tasks that fill the workers' gaps.
class Block {
 public:
  // `layer` must outlive the block.
  Block(const Layer& layer, uint32_t base);

  // Does some l-th earliest worker finish lag the end of the block's reads by at least l shard reads of the base?
  bool compute_bound() const;
  // Puts a Type-II task at the earliest position at which no worker gains idle time; if there is none, behind the tasks
  // that precede it.
  void insert(uint32_t task);
  std::span<const uint32_t> order() const { return order_; }

 private:
  // Numbers of shards, for the closed form of a block in which all shards cost the same.
  struct Uniform {
    bool applies = true;
    int64_t resident_shards = 0;
    int64_t read_shards = 0;
    Picoseconds decompress = -1;  // -1: no shard yet
    Picoseconds read = -1;
  };

  bool reads_exponent(uint32_t task) const { return layer_->work()[task].read_exponent; }
  const TaskCosts& costs(uint32_t task) const { return layer_->tasks()[task].costs; }
  Uniform with(uint32_t task) const;
  void load_closed_form(const Uniform& uniform, Picoseconds io_end, WorkerLoad& load) const;
  void load_simulated(uint32_t task, size_t position, Picoseconds io_end, WorkerLoad& load);
  void summarise(Picoseconds io_end, WorkerLoad& load) const;
  bool same_shards(uint32_t a, uint32_t b) const;
  size_t fallback_position(uint32_t task) const;

  const Layer* layer_;
  uint32_t base_;
  std::vector<uint32_t> order_;
  Picoseconds io_end_ = 0;
  Picoseconds decompression_ = 0;  // of all shards
  Uniform uniform_;
  WorkerLoad load_;
  // Scratch, kept to save allocations.
  WorkerLoad candidate_;
  ShardLanes lanes_;
  DecompressionWorkers workers_;
};

}  // namespace zipmoe
