// Geometry and header of an FX3 blob (docs/format.md, "FX3"): where everything lies, for a matrix of a given shape.
#pragma once
#include <array>
#include <cstdint>
#include <span>

#include "codec/codec.hpp"
#include "simd/fx3_record.hpp"

namespace zipmoe {

using simd::kFx3PanelColumnsMax;

constexpr uint64_t kFx3Alignment = 64;
constexpr uint64_t kFx3HeaderBytes = 64;
constexpr uint64_t kFx3TailBytes = 64;  // readable bytes behind the exceptions: kernels load 64 at a time

struct Fx3Layout {
  MatrixShape shape;
  uint64_t padded_columns;  // multiple of 64
  uint64_t panel_columns;   // columns per panel, multiple of 64, at most 4096, divides padded_columns
  uint64_t panels;
  uint64_t groups;  // row groups of 4 rows, the last one padded
  uint64_t blocks;  // 64-column blocks per row and panel

  // Offsets from the start of the blob; the raw fallback has none of them.
  uint64_t index_offset;
  uint64_t records_offset;
  uint64_t exceptions_offset;

  // Throws std::invalid_argument for a shape that the format cannot hold.
  static Fx3Layout of(MatrixShape shape);

  uint64_t index_entries() const { return panels * groups + 1; }
  uint64_t group_bytes() const { return blocks * simd::kFx3GroupRows * simd::kFx3RecordBytes; }
  uint64_t raw_bytes() const { return shape.rows * shape.columns * sizeof(uint16_t); }

  // Exact length of a blob with fixed-length codes and of one with the raw fallback.
  uint64_t coded_blob_bytes(uint64_t exception_bytes) const;
  uint64_t raw_blob_bytes() const;

  // The encoder's choice: raw when the codes would take more than .95 of the BF16 matrix or overflow the index.
  bool prefers_raw(uint64_t exception_bytes) const;
};

struct Fx3Header {
  bool raw;                          // flag bit 0: the matrix follows as it is
  std::array<uint8_t, 8> exponents;  // of codes 0..6; [7] is 255 and marks the escape; all 0 in the raw fallback
  uint64_t exception_bytes;
};

void write_fx3_header(const Fx3Layout& layout, const Fx3Header& header, uint8_t* blob);

// Checks every field against the shape and the length of the blob; throws FormatError. Constant time.
Fx3Header read_fx3_header(std::span<const uint8_t> blob, const Fx3Layout& layout);

}  // namespace zipmoe
