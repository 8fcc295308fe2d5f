#include "runtime/worker_pool.hpp"

#include <stdexcept>
#include <utility>

namespace zipmoe {

WorkerPool::WorkerPool(uint32_t threads) {
  if (threads == 0) throw std::invalid_argument("decoding needs at least one thread");
  workers_.reserve(threads - 1);
  for (uint32_t i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  step_begins_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::run(uint32_t tasks, const std::function<void(uint32_t)>& body) {
  std::lock_guard step(step_mutex_);
  if (tasks <= 1 || workers_.empty()) {
    for (uint32_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  std::unique_lock lock(mutex_);
  body_ = &body;
  tasks_ = tasks;
  next_task_ = 0;
  step_begins_.notify_all();
  take_tasks(lock);
  step_ends_.wait(lock, [this] { return running_ == 0; });
  tasks_ = next_task_ = 0;
  body_ = nullptr;
  if (const auto failure = std::exchange(failure_, std::nullopt)) throw std::runtime_error(*failure);
}

void WorkerPool::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    step_begins_.wait(lock, [this] { return stopping_ || next_task_ < tasks_; });
    if (stopping_) return;
    take_tasks(lock);
  }
}

void WorkerPool::take_tasks(std::unique_lock<std::mutex>& lock) {
  while (next_task_ < tasks_) {
    const uint32_t task = next_task_++;
    const std::function<void(uint32_t)>& body = *body_;
    ++running_;
    lock.unlock();
    std::optional<std::string> failure;
    try {
      body(task);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    --running_;
    if (failure) {
      if (!failure_) failure_ = std::move(failure);
      next_task_ = tasks_;
    }
  }
  if (running_ == 0) step_ends_.notify_all();
}

}  // namespace zipmoe
