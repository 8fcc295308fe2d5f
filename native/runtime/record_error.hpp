// A record that could not be brought into memory, and why. Carried from the thread that noticed it to the caller.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cache/eviction_policy.hpp"

namespace zipmoe {

enum class RecordFault : uint8_t { read_failed, truncated, checksum_mismatch, invalid_encoding };

constexpr std::string_view name(RecordFault fault) {
  switch (fault) {
    case RecordFault::read_failed:
      return "read_failed";
    case RecordFault::truncated:
      return "truncated";
    case RecordFault::checksum_mismatch:
      return "checksum_mismatch";
    case RecordFault::invalid_encoding:
      return "invalid_encoding";
  }
  return "unknown";
}

class RecordError : public std::runtime_error {
 public:
  RecordError(RecordFault fault, RecordIndex record, const std::string& message)
      : std::runtime_error(message), fault_(fault), record_(record) {}
  RecordFault fault() const { return fault_; }
  RecordIndex record() const { return record_; }

 private:
  RecordFault fault_;
  RecordIndex record_;
};

}  // namespace zipmoe
