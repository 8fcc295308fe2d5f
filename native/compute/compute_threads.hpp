// Threads that share the tasks of one short parallel step, some tens of microseconds long. Unlike runtime/worker_pool
// they wait actively for a moment before they sleep: waking a sleeping thread takes as long as such a step.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "compute/scratch_pool.hpp"

namespace zipmoe {

class ComputeThreads {
 public:
  // `threads` counts the caller: 1 starts none. `spin`: how long a thread without work keeps looking for some before it
  // sleeps. Throws std::invalid_argument for no threads or a negative time.
  explicit ComputeThreads(uint32_t threads, std::chrono::microseconds spin = std::chrono::microseconds(200));
  ~ComputeThreads();
  ComputeThreads(const ComputeThreads&) = delete;
  ComputeThreads& operator=(const ComputeThreads&) = delete;

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }

  // For tasks, and for what the steps of one call hand to each other (TokenInputs).
  ScratchPool& scratch() { return scratch_; }

  // Runs body(0) .. body(tasks - 1), each once, on any thread, and returns when all are done; the caller works along.
  // Every thread takes tasks of a range of its own, in order, so that what it reads lies one behind the other and is
  // prefetched across tasks; who is done takes from the end of the longest range that is left. Every task runs with the
  // default floating-point environment. When a task throws, the rest is still run, and a std::runtime_error with the
  // first message is thrown here. Steps of several callers run one after the other.
  void run(uint32_t tasks, const std::function<void(uint32_t)>& body);

 private:
  // Tasks [begin, end) that nobody has begun, in one word. On a cache line of its own.
  struct alignas(64) Range {
    std::atomic<uint64_t> bounds = 0;
  };

  void serve(uint32_t thread);
  bool take_task(uint32_t thread);
  static std::optional<uint32_t> take_first(Range& range);
  static std::optional<uint32_t> take_last(Range& range);
  void run_task(uint32_t task) noexcept;
  void wait_for_end();

  std::chrono::microseconds spin_;
  ScratchPool scratch_;
  std::mutex step_mutex_;  // one step at a time

  // The step. `body_` is written before the ranges, and read only by who has taken a task: the step cannot end before
  // he has finished.
  const std::function<void(uint32_t)>* body_ = nullptr;
  std::vector<Range> ranges_;             // by thread, the caller first
  std::atomic<uint32_t> unfinished_ = 0;  // tasks that are not done
  std::atomic<uint32_t> step_ = 0;        // changes with every step; sleepers wait for that
  std::mutex failure_mutex_;
  std::optional<std::string> failure_;
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace zipmoe
