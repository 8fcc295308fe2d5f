// Reader backend: a few threads with blocking reads. Large reads are cut into chunks that all threads work on, so that
// one missing expert already uses the whole queue depth and the first of several arrives as early as possible.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/reader.hpp"
#include "io/source_file.hpp"

namespace zipmoe {

struct ThreadPoolReaderOptions {
  uint32_t threads = 4;
  uint64_t chunk_bytes = uint64_t{4} << 20;
  uint32_t queue_capacity = 1024;  // reads submitted and not yet completed
  IoMode mode = IoMode::automatic;
};

class ThreadPoolReader final : public Reader {
 public:
  // Opens all files; throws FileOpenError.
  ThreadPoolReader(const std::vector<std::string>& paths, const ThreadPoolReaderOptions& options);
  ~ThreadPoolReader() override;

  void submit(const ReadJob& job) override;
  void cancel() noexcept override;
  ReadCounters counters() const override;
  std::string mode() const override;
  std::string fallback_reason() const override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    ReadJob job;
    uint64_t next_chunk = 0;   // byte offset in the job of the first chunk that no thread has taken
    uint32_t chunks_left = 0;  // not yet finished
    uint64_t bytes = 0;
    int error_number = 0;
    Clock::time_point submitted;
  };

  void serve();
  void finish_chunk(const std::shared_ptr<Pending>& pending, const ReadOutcome& outcome);

  std::vector<SourceFile> files_;
  const ThreadPoolReaderOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable room_available_;
  std::deque<std::shared_ptr<Pending>> queue_;  // jobs with chunks that no thread has taken
  uint32_t outstanding_ = 0;
  Clock::time_point busy_since_;
  ReadCounters counters_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace zipmoe
