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

namespace zipmoe {

class ComputeThreads {
 public:
  // `threads` counts the caller: 1 starts none. `spin`: how long a thread without work keeps looking for some before it
  // sleeps. Throws std::invalid_argument for no threads or a negative time.
  explicit ComputeThreads(uint32_t threads, std::chrono::microseconds spin = std::chrono::microseconds(50));
  ~ComputeThreads();
  ComputeThreads(const ComputeThreads&) = delete;
  ComputeThreads& operator=(const ComputeThreads&) = delete;

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }

  // Runs body(0) .. body(tasks - 1), each once, on any thread, begun in this order, and returns when all are done; the
  // caller works along. Every task runs with the default floating-point environment. When a task throws, the rest is
  // still run, and a std::runtime_error with the first message is thrown here. Steps of several callers run one after
  // the other.
  void run(uint32_t tasks, const std::function<void(uint32_t)>& body);

 private:
  void serve();
  bool take_task();
  void run_task(uint32_t task) noexcept;
  void wait_for_end();

  std::chrono::microseconds spin_;
  std::mutex step_mutex_;  // one step at a time

  // The step. Plain members are written before `tickets_`, and read only by who has taken a ticket: the step cannot end
  // before he has finished.
  const std::function<void(uint32_t)>* body_ = nullptr;
  uint32_t tasks_ = 0;
  std::atomic<uint32_t> tickets_ = 0;     // tasks that nobody has begun
  std::atomic<uint32_t> unfinished_ = 0;  // tasks that are not done
  std::atomic<uint32_t> step_ = 0;        // changes with every step; sleepers wait for that
  std::mutex failure_mutex_;
  std::optional<std::string> failure_;
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace zipmoe
