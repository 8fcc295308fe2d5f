// The machine model: one I/O server, L decompression workers, one execution resource.
//
// Reads run one after the other without gaps. A shard is ready when its read has ended, or at once if its chunk is in
// memory; a free worker takes the ready shard of the highest priority. Recombination is work of the execution resource,
// ahead of the execution of the expert; that resource serves what is available in the order in which it became so.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/layer.hpp"

namespace zipmoe {

// Workers taking shards. The one that has been free for longest takes the next; among several, the one whose last shard
// was taken first.
class DecompressionWorkers {
 public:
  struct Worker {
    Picoseconds finish;  // of its last shard; 0 if it had none
    Picoseconds busy;    // time spent decompressing
    uint32_t number;
  };

  explicit DecompressionWorkers(uint32_t workers) : queue_(workers) { reset(); }
  void reset();

  // The worker that takes the next shard.
  const Worker& next() const { return queue_[head_]; }
  // Lets it take one; returns the end of the decompression. Starts must not decrease from call to call.
  Picoseconds take(Picoseconds start, Picoseconds duration) {
    Worker worker = queue_[head_];
    worker.finish = start + duration;
    worker.busy += duration;
    // The freed place is the queue's last one; nearly always the worker belongs there.
    size_t place = head_;
    head_ = head_ + 1 == queue_.size() ? 0 : head_ + 1;
    while (place != head_) {
      const size_t ahead = place == 0 ? queue_.size() - 1 : place - 1;
      if (queue_[ahead].finish <= worker.finish) break;
      queue_[place] = queue_[ahead];
      place = ahead;
    }
    queue_[place] = worker;
    return worker.finish;
  }
  std::span<const Worker> all() const { return queue_; }  // in no particular order

 private:
  std::vector<Worker> queue_;  // a ring, ascending by finish from head_; equal ones in the order of their last shards
  size_t head_ = 0;
};

// The shards of tasks in priority order, in two lanes: those whose chunk must be read (their reads follow the same
// order, so they become ready in it) and those of chunks in memory, ready from the start.
struct ShardSource {
  uint32_t priority;        // ascending within a lane
  Picoseconds first_ready;  // of its first shard
  Picoseconds interval;     // between its shards; both are 0 in the lane of chunks in memory
  Picoseconds decompress;
};
struct ShardLanes {
  std::vector<ShardSource> read;
  std::vector<ShardSource> resident;
};

// Runs all shards; calls `taken(priority, shard, worker, start, end)` in the order in which they are taken.
template <typename Taken>
void run_decompressions(const ShardLanes& lanes, uint32_t shards, DecompressionWorkers& workers, const Taken& taken) {
  size_t read = 0;
  size_t resident = 0;
  uint32_t read_shard = 0;
  uint32_t resident_shard = 0;
  while (read < lanes.read.size() || resident < lanes.resident.size()) {
    const uint32_t worker = workers.next().number;
    Picoseconds start = workers.next().finish;
    bool take_resident = resident < lanes.resident.size();
    if (read < lanes.read.size()) {
      const ShardSource& source = lanes.read[read];
      const Picoseconds ready = source.first_ready + Picoseconds{read_shard} * source.interval;
      if (!take_resident) {
        start = ready > start ? ready : start;
      } else if (ready <= start && source.priority < lanes.resident[resident].priority) {
        take_resident = false;
      }
    }
    size_t& position = take_resident ? resident : read;
    uint32_t& shard = take_resident ? resident_shard : read_shard;
    const ShardSource& source = take_resident ? lanes.resident[position] : lanes.read[position];
    const Picoseconds end = workers.take(start, source.decompress);
    taken(source.priority, shard, worker, start, end);
    if (++shard == shards) {
      shard = 0;
      ++position;
    }
  }
}

struct TimeSpan {
  Picoseconds start = 0;
  Picoseconds end = 0;
};
struct Read {
  uint32_t task;
  OperationKind kind;  // read_exponent, read_sign_mantissa or read_packed
  uint32_t shard;
  TimeSpan time;
};
struct Decompression {
  uint32_t task;
  uint32_t shard;
  uint32_t worker;
  TimeSpan time;
};
struct Timeline {
  std::vector<Read> reads;                    // in the order of the I/O server
  std::vector<Decompression> decompressions;  // in priority order
  std::vector<TimeSpan> recombinations;       // per task; empty spans at the time of availability where there is none
  std::vector<TimeSpan> executions;           // per expert position
  Picoseconds io_end = 0;
  Picoseconds makespan = 0;
};

// `order` holds every task that has work once.
Timeline simulate(const Layer& layer, const TaskOrder& order);
// The same makespan without the record of who did what.
Picoseconds makespan(const Layer& layer, const TaskOrder& order);

}  // namespace zipmoe
