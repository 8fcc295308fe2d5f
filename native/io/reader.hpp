// Reads of aligned byte ranges of files into memory: the one interface that the executor knows, whatever carries the
// reads out.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace zipmoe {

// Offsets, lengths and destinations of all reads are multiples of this: what direct I/O asks for on every common
// device.
inline constexpr uint64_t kReadAlignmentBytes = 4096;

struct ReadCompletion {
  uint64_t tag = 0;
  // Bytes that arrived before the end of the file; fewer than asked for means that the file is too short.
  uint64_t bytes = 0;
  // errno of the first failure, 0 = none.
  int error_number = 0;
};

// Is called on threads of the reader. Must not block for long: it may do work on the bytes.
class ReadSink {
 public:
  virtual ~ReadSink() = default;
  // These bytes of the read are there, positions counted from its beginning; others may be on their way, or have
  // failed. In any order, of one read from several threads at a time, and always before its completion; a reader that
  // does not read in chunks, or is given the bytes by another one, may leave it out.
  virtual void chunk_read(uint64_t /*tag*/, uint64_t /*begin*/, uint64_t /*length*/) noexcept {}
  // In any order.
  virtual void read_completed(const ReadCompletion& completion) noexcept = 0;
};

struct ReadJob {
  uint32_t file = 0;  // index of the file in the reader
  uint64_t offset = 0;
  uint64_t length = 0;
  uint8_t* destination = nullptr;
  uint64_t tag = 0;  // returned with the completion
  ReadSink* sink = nullptr;
  // One read into two places: the bytes from this position on go to `rest_destination`. 0: all go to `destination`.
  uint64_t split = 0;
  uint8_t* rest_destination = nullptr;
  // For what may turn out not to be needed: begins only while no other read is outstanding.
  bool background = false;

  // Bytes from `position` on that lie together in memory.
  uint64_t contiguous_bytes(uint64_t position) const { return (position < split ? split : length) - position; }
  uint8_t* destination_of(uint64_t position) const {
    return split > 0 && position >= split ? rest_destination + (position - split) : destination + position;
  }
};

// Reads of which anything was carried out; what was cancelled before is none.
struct ReadCounters {
  uint64_t reads = 0;
  uint64_t bytes = 0;
  double busy_seconds = 0;  // time during which at least one read was outstanding
  // Sum over all reads, from submission to completion; in the background from the beginning, or from promotion if that
  // came first.
  double latency_seconds = 0;
  double longest_seconds = 0;  // the slowest read
};

class Reader {
 public:
  virtual ~Reader() = default;
  // Queues one read; blocks while the queue is full. Every submitted read is completed exactly once, if need be with an
  // error. Must not be called from a sink.
  virtual void submit(const ReadJob& job) = 0;
  // The same for many at once, in their order: small reads one by one spend most of their time on waking threads. What
  // submit() would throw for one of them is thrown before any is queued; a reader that throws must see to that itself.
  virtual void submit_all(std::span<const ReadJob> jobs) {
    for (const ReadJob& job : jobs) submit(job);
  }
  // What has been submitted and not yet begun is completed with ECANCELED; reads under way go on, and background reads
  // stay as they are.
  virtual void cancel() noexcept = 0;
  // The background read with this tag is an ordinary one from now on, behind those that were submitted before. Returns
  // whether it had begun. A reader without precedence reads everything in its order.
  virtual bool promote(uint64_t /*tag*/) noexcept { return true; }
  // Background reads are completed with ECANCELED, as far as they have not begun: of one that is being read, blocks.
  virtual void cancel_background() noexcept {}
  virtual ReadCounters counters() const = 0;
  // "direct" or "buffered".
  virtual std::string mode() const = 0;
  // Why reads are not direct; empty if they are.
  virtual std::string fallback_reason() const = 0;
};

}  // namespace zipmoe
