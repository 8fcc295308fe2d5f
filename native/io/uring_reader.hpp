// Reader backend: io_uring. One thread hands blocks of the reads to the kernel, as many as the queue depth allows, and
// takes them back; others verify what has arrived, block by block.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "io/completion_threads.hpp"
#include "io/read_queue.hpp"
#include "io/reader.hpp"
#include "io/source_file.hpp"
#include "io/uring_ring.hpp"

namespace zipmoe {

struct UringReaderOptions {
  uint32_t queue_depth = 8;                        // blocks that the kernel has at a time
  uint64_t block_bytes = uint64_t{2} << 20;        // of the longest blocks; a multiple of 4096, at most 1 GiB
  uint64_t least_block_bytes = uint64_t{2} << 20;  // one thread handles all: shorter blocks do not pay
  uint32_t queue_capacity = 1024;                  // reads submitted and not yet completed
  uint32_t completion_threads = 1;                 // that tell the sinks; 0: the thread of the ring does
  std::vector<std::span<uint8_t>> memory = {};     // to be registered with the kernel
  IoMode mode = IoMode::automatic;
};

class UringReader final : public Reader {
 public:
  // Opens all files; throws FileOpenError, UringUnavailable.
  UringReader(const std::vector<std::string>& paths, const UringReaderOptions& options);
  ~UringReader() override;

  void submit(const ReadJob& job) override;
  void submit_all(std::span<const ReadJob> jobs) override;
  void cancel() noexcept override { queue_.cancel(); }
  bool promote(uint64_t tag) noexcept override;
  void cancel_background() noexcept override;
  ReadCounters counters() const override { return queue_.counters(); }
  std::string mode() const override { return files_.mode(); }
  std::string fallback_reason() const override { return files_.fallback_reason(); }

  // Why files or memory could not be registered with the kernel; empty if they were, or nobody asked for it.
  const std::string& registration_refusal() const { return registration_refusal_; }

 private:
  // Owns a descriptor.
  class WakeEvent {
   public:
    WakeEvent();  // throws UringUnavailable
    ~WakeEvent();
    WakeEvent(const WakeEvent&) = delete;
    WakeEvent& operator=(const WakeEvent&) = delete;
    void signal() const noexcept;
    int descriptor() const { return descriptor_; }

   private:
    int descriptor_;
  };

  void serve(std::promise<void> ready);
  void register_all(UringRing& ring);
  void start_reads(UringRing& ring);
  void finish_read(const UringCompletion& completion);
  ReadOutcome outcome_of(const ReadChunk& chunk, int32_t result) const;
  void hand_over(ReadChunk chunk, const ReadOutcome& outcome);
  void finish(const ArrivedChunk& arrived);  // on a completion thread

  const UringReaderOptions options_;
  const SourceFiles files_;
  WakeEvent wake_event_;
  ReadQueue queue_;
  CompletionThreads completion_threads_;
  std::string registration_refusal_;  // written before the constructor ends
  bool registered_files_ = false;
  // The ring thread's own.
  std::vector<std::optional<ReadChunk>> under_way_;  // by token
  std::vector<uint32_t> free_tokens_;
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace zipmoe
