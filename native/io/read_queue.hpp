// Reads submitted and not yet completed, whatever carries them out: bounded, cut into chunks, counted. Background reads
// get chunks only while no other read is outstanding, and small ones, so that whoever comes waits for little.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "io/reader.hpp"
#include "io/source_file.hpp"

namespace zipmoe {

// A part of a read that is carried out at once: its bytes lie together in the file and in memory.
class ReadChunk {
 public:
  const ReadJob& job() const { return pending_->job; }
  uint64_t file_offset() const { return job().offset + begin_; }
  uint64_t length() const { return length_; }
  uint8_t* destination() const { return job().destination_of(begin_); }
  // The read has failed or been cancelled meanwhile: the chunk is to be finished with ECANCELED, without reading.
  bool skip() const { return skip_; }
  // Hands the bytes to the sink of the read, if all of them came.
  void tell_sink(const ReadOutcome& outcome) const noexcept {
    if (outcome.error_number == 0 && outcome.bytes == length_) job().sink->chunk_read(job().tag, begin_, length_);
  }

 private:
  friend class ReadQueue;
  struct Pending {
    ReadJob job;
    bool background = false;        // no longer that of the job once it was promoted
    uint64_t next_chunk = 0;        // byte offset in the job of the first chunk that nobody has taken
    uint32_t chunks_under_way = 0;  // taken and not finished
    uint64_t bytes = 0;
    bool all_taken() const { return next_chunk == job.length; }
    int error_number = 0;
    bool carried_out = false;  // any of its chunks
    // When it was submitted; in the background it is nobody's before its first chunk is taken, or it is promoted.
    std::chrono::steady_clock::time_point begin;
    std::chrono::steady_clock::time_point end;  // when the last chunk came from the disk
  };
  ReadChunk(std::shared_ptr<Pending> pending, uint64_t begin, uint64_t length, bool skip)
      : pending_(std::move(pending)), begin_(begin), length_(length), skip_(skip) {}

  std::shared_ptr<Pending> pending_;
  uint64_t begin_;
  uint64_t length_;
  bool skip_;
};

// A read all of whose chunks are finished; whoever gets it tells the sink.
struct FinishedRead {
  ReadSink* sink;
  ReadCompletion completion;
  // Background reads may go on, and somebody has tried to take a chunk since the last push or such news, and went away
  // without one.
  bool turned_away = false;
  void tell_sink() const noexcept { sink->read_completed(completion); }
};

// Thread-safe.
class ReadQueue {
 public:
  // Shorter chunks cost the disk more than they save.
  static constexpr uint64_t kLeastChunkBytes = uint64_t{1} << 20;

  // `chunk_bytes`: of the longest chunks. Throws std::invalid_argument.
  ReadQueue(uint32_t files, uint64_t chunk_bytes, uint32_t capacity, uint64_t least_chunk_bytes = kLeastChunkBytes);

  // Waits while the queue is full; throws std::out_of_range, std::invalid_argument, and then nothing is queued. Calls
  // `wake` if somebody has tried to take a chunk since the last push, and went away without one. A read for which there
  // is no memory in the queue is completed with ENOMEM.
  void push_all(std::span<const ReadJob> jobs, const std::function<void()>& wake = {});
  void push(const ReadJob& job, const std::function<void()>& wake = {}) { push_all({&job, 1}, wake); }
  // The next chunk, in the order of the reads, those in the background last; waits for one. Nothing: the queue was
  // stopped, and is empty.
  std::optional<ReadChunk> take();
  // The same without waiting. Nothing: there is none now.
  std::optional<ReadChunk> try_take();
  // Counts the chunk as done, its bytes having come from the disk at `arrived`. Returns the read if that was its last
  // one.
  std::optional<FinishedRead> finish(const ReadChunk& chunk, const ReadOutcome& outcome,
                                     std::chrono::steady_clock::time_point arrived);

  // What has not been taken yet will be skipped; not of background reads.
  void cancel() noexcept;
  // See Reader.
  bool promote(uint64_t tag) noexcept;
  void cancel_background() noexcept;
  // The same for all that follows, and lets `take` end.
  void stop() noexcept;
  bool stopped() const;
  ReadCounters counters() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Pending = ReadChunk::Pending;

  void check(const ReadJob& job) const;
  bool available() const;
  bool enqueue(const std::shared_ptr<Pending>& pending, Clock::time_point now) noexcept;
  ReadChunk take_first();
  // The chunks of a read become shorter towards its end, half of what is left each, so that little is left of a
  // checksum that is computed chunk by chunk when the last one comes.
  uint64_t half_of(uint64_t left) const;

  const uint32_t files_;
  const uint64_t chunk_bytes_;
  const uint64_t least_chunk_bytes_;
  const uint32_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable room_available_;
  std::deque<std::shared_ptr<Pending>> queue_;        // reads with chunks that nobody has taken
  std::vector<std::shared_ptr<Pending>> background_;  // all that are outstanding, in their order
  uint32_t outstanding_ = 0;
  uint32_t foreground_ = 0;   // of these, reads that are not in the background
  bool turned_away_ = false;  // by try_take
  bool stopping_ = false;
  Clock::time_point busy_since_;
  Clock::time_point last_arrival_;
  ReadCounters counters_;
};

}  // namespace zipmoe
