// In which order the missing parts of one request are read: the paper's scheduler, asked with what is known here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/scheduler.hpp"

namespace zipmoe {

struct ReadDemand {
  Residency residency = Residency::miss;
  uint64_t exponent_bytes = 0;       // of a codec without parts: 0
  uint64_t sign_mantissa_bytes = 0;  // of a codec without parts: the record
  uint64_t weights = 0;
  uint32_t tokens = 1;  // routed to the expert; more tokens, longer execution
};

struct ReadRates {
  double read_bytes_per_second = 1e9;
  double decode_bytes_per_second = 1e9;  // of BF16, all workers together
};

// Indices of the experts that need a read, in the order of their first one. `experts`: in ascending order of their ids,
// each read and decoded as one task of the schedule.
std::vector<uint32_t> order_of_reads(std::span<const ReadDemand> experts, const ChunkLayout& layout, uint32_t workers,
                                     const ReadRates& rates, OrderKind kind);

}  // namespace zipmoe
