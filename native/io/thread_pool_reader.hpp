// Reader backend: a few threads with blocking reads. Large reads are cut into chunks that all threads work on, so that
// one missing expert already uses the whole queue depth and the first of several arrives as early as possible.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "io/read_queue.hpp"
#include "io/reader.hpp"
#include "io/source_file.hpp"

namespace zipmoe {

struct ThreadPoolReaderOptions {
  uint32_t threads = 4;
  uint64_t chunk_bytes = uint64_t{4} << 20;  // of the longest chunks
  uint64_t least_chunk_bytes = ReadQueue::kLeastChunkBytes;
  uint32_t queue_capacity = 1024;  // reads submitted and not yet completed
  IoMode mode = IoMode::automatic;
};

class ThreadPoolReader final : public Reader {
 public:
  // Opens all files; throws FileOpenError.
  ThreadPoolReader(const std::vector<std::string>& paths, const ThreadPoolReaderOptions& options);
  ~ThreadPoolReader() override;

  void submit(const ReadJob& job) override { queue_.push(job); }
  void submit_all(std::span<const ReadJob> jobs) override { queue_.push_all(jobs); }
  void cancel() noexcept override { queue_.cancel(); }
  bool promote(uint64_t tag) noexcept override { return queue_.promote(tag); }
  void cancel_background() noexcept override { queue_.cancel_background(); }
  ReadCounters counters() const override { return queue_.counters(); }
  std::string mode() const override { return files_.mode(); }
  std::string fallback_reason() const override { return files_.fallback_reason(); }

 private:
  void serve();

  const SourceFiles files_;
  ReadQueue queue_;
  std::vector<std::thread> threads_;
};

}  // namespace zipmoe
