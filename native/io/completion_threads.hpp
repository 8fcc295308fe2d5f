// Threads that tell the sinks of finished reads, so that what a sink does with the bytes does not hold up the reads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "io/read_queue.hpp"

namespace zipmoe {

class CompletionThreads {
 public:
  // Without a thread, the caller of `add` tells the sink.
  explicit CompletionThreads(uint32_t threads);
  // Tells the sinks of all that was added.
  ~CompletionThreads();
  CompletionThreads(const CompletionThreads&) = delete;
  CompletionThreads& operator=(const CompletionThreads&) = delete;

  // Waits while every thread has several reads before it.
  void add(const FinishedRead& finished);

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable room_available_;
  std::deque<FinishedRead> queue_;
  bool stopping_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace zipmoe
