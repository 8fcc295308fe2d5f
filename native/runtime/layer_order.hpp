// In which order the missing parts of one request are read and its shards decompressed: the paper's scheduler, asked
// with what is known here. A pure function.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "schedule/scheduler.hpp"

namespace zipmoe {

struct TensorWork {
  uint64_t exponent_bytes = 0;       // compressed; of a codec without parts: 0
  uint64_t sign_mantissa_bytes = 0;  // of a codec without parts: the packed section
  uint64_t weights = 0;
  uint32_t shards = 1;
};

struct ExpertWork {
  Residency residency = Residency::miss;
  uint32_t tokens = 1;  // routed to the expert; more tokens, longer execution
  std::vector<TensorWork> tensors;
};

struct ReadRates {
  double read_bytes_per_second = 1e9;
  double decode_bytes_per_second = 1e9;  // of BF16, all workers together
};

// One read of one expert: its E-chunks, its SM-chunks or both, by extent. Of a codec without parts: {true, false}.
struct PartRead {
  uint32_t expert;
  std::array<bool, 2> parts;
  friend bool operator==(const PartRead&, const PartRead&) = default;
};

struct ShardTask {
  uint32_t expert;
  uint32_t tensor;
  uint32_t shard;
  friend bool operator==(const ShardTask&, const ShardTask&) = default;
};

struct LayerOrder {
  std::vector<PartRead> reads;            // in the order of the I/O queue
  std::vector<ShardTask> decompressions;  // by descending priority
};

// `experts`: in ascending order of their ids; one task of the schedule per tensor. The chunks of all tensors of an
// expert lie in one extent and are read and verified together, at the place of the first of them; reads of both extents
// of an expert that follow each other are one. All tensors count with their mean costs: the paper's scheduler knows one
// cost of each kind, only then its bound holds, and then ordering a large layer takes microseconds
// (docs/scheduling.md).
LayerOrder layer_order(std::span<const ExpertWork> experts, const ChunkLayout& layout, uint32_t workers,
                       const ReadRates& rates, OrderKind kind);

// For a request that hands out by ascending id: expert after expert, in one read what is missing when its turn comes.
LayerOrder ascending_order(std::span<const ExpertWork> experts, const ChunkLayout& layout);

}  // namespace zipmoe
