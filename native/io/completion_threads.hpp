// Threads that tell the sinks of chunks and finished reads, so that what a sink does with the bytes does not hold up
// the reads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "io/read_queue.hpp"

namespace zipmoe {

// A chunk that came from the disk, or did not.
struct ArrivedChunk {
  ReadChunk chunk;
  ReadOutcome outcome;
  std::chrono::steady_clock::time_point time;
};

class CompletionThreads {
 public:
  using Handler = std::function<void(const ArrivedChunk&)>;

  // The handler must not throw. Without a thread, the caller of `add` calls it.
  CompletionThreads(uint32_t threads, Handler handler);
  // Handles all that was added.
  ~CompletionThreads();
  CompletionThreads(const CompletionThreads&) = delete;
  CompletionThreads& operator=(const CompletionThreads&) = delete;

  // Waits while every thread has several chunks before it.
  void add(ArrivedChunk arrived);

 private:
  void serve();

  const Handler handler_;
  std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable room_available_;
  std::deque<ArrivedChunk> queue_;
  bool stopping_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace zipmoe
