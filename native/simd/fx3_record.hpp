// Shape of an FX3 record, shared by the kernels of all instruction sets (docs/format.md, "FX3"). Constants only.
#pragma once
#include <stdint.h>

namespace zipmoe::simd {

constexpr uint64_t kFx3BlockWeights = 64;
constexpr uint64_t kFx3GroupRows = 4;
constexpr uint64_t kFx3RecordBytes = 88;
constexpr uint64_t kFx3LowBitsOffset = 64;   // A[16]: bits 0 and 1 of the codes
constexpr uint64_t kFx3HighBitsOffset = 80;  // B[8]: bit 2 of the codes
constexpr uint64_t kFx3EscapeCode = 7;
constexpr uint64_t kFx3PanelColumnsMax = 4096;  // a panel of inputs stays in the first-level cache
constexpr uint64_t kFx3EscapesPerBlockMax = kFx3BlockWeights * kFx3GroupRows;  // one block of all rows of a group

// Storage position p of a record holds weight 32 * ((p >> 3) & 1) + 8 * (p >> 4) + (p & 7) of its block.
constexpr uint8_t fx3_weight_of_position(uint64_t p) {
  return static_cast<uint8_t>(32 * ((p >> 3) & 1) + 8 * (p >> 4) + (p & 7));
}

}  // namespace zipmoe::simd
