// How the kernels for many tokens divide their work (docs/compute.md), shared by the instruction sets. Plain C types
// only.
#pragma once
#include <stdint.h>

#include "simd/fx3_record.hpp"

namespace zipmoe::simd {

constexpr uint64_t kTileTokensMax = 6;
constexpr uint64_t kFourRowsBlock = kFx3GroupRows * kFx3BlockWeights;

constexpr uint64_t tile_count(uint64_t tokens) { return (tokens + kTileTokensMax - 1) / kTileTokensMax; }

// One panel of a group of four rows, unpacked: [block][row][64], padded with zeros.
struct FourRows {
  const uint16_t* weights;
  uint64_t blocks;
};

struct TileInputs {
  const uint16_t* x;
  uint64_t stride;
};

// Four sums of each token.
struct TileOutput {
  float* sums;
  uint64_t stride;
  bool add;
};

}  // namespace zipmoe::simd
