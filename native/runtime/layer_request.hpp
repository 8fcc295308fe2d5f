// One sparse layer's need for experts, whatever holds them in memory: hands them out one by one.
#pragma once

#include <chrono>
#include <cstdint>

namespace zipmoe {

enum class HandOutOrder : uint8_t { as_available, ascending };

struct RequestStep {
  enum class Kind : uint8_t { record, waiting, finished };
  Kind kind;
  uint32_t position = 0;  // in the list of records that the request was made with
};

class LayerRequest {
 public:
  virtual ~LayerRequest() = default;

  // Releases the expert handed out before and returns the next one, or `waiting` when none became resident in time.
  // Throws RecordError when a record cannot be read; the request is over then.
  virtual RequestStep next(std::chrono::milliseconds timeout) = 0;
  // Hands out all experts at once, until the request ends, if all are in memory and none was handed out.
  virtual bool take_all() { return false; }
  // Begins reads as far as there is room; next() does so as well.
  virtual void begin_reads() {}

  virtual uint64_t hits() const = 0;    // nothing was read for them
  virtual uint64_t misses() const = 0;  // the others, but those whose reads had begun before they were asked for
  virtual uint64_t prefetched() const { return 0; }
  // Time that callers spent in next() waiting for reads.
  virtual double wait_seconds() const = 0;
};

}  // namespace zipmoe
