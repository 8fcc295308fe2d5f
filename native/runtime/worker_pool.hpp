// Threads that share the tasks of one parallel step. They sleep between steps; the caller works along.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace zipmoe {

class WorkerPool {
 public:
  // `threads` counts the caller: 1 starts none.
  explicit WorkerPool(uint32_t threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }

  // Runs body(0) .. body(tasks - 1), each once, and returns when all are done. When a task throws, the tasks not yet
  // begun are dropped and a std::runtime_error with the first message is thrown here. Steps of several callers run one
  // after the other.
  void run(uint32_t tasks, const std::function<void(uint32_t)>& body);

 private:
  void serve();
  void take_tasks(std::unique_lock<std::mutex>& lock);

  std::mutex step_mutex_;  // one step at a time
  std::mutex mutex_;
  std::condition_variable step_begins_;
  std::condition_variable step_ends_;
  const std::function<void(uint32_t)>* body_ = nullptr;
  uint32_t tasks_ = 0;
  uint32_t next_task_ = 0;
  uint32_t running_ = 0;
  std::optional<std::string> failure_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace zipmoe
