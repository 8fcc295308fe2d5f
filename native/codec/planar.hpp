// Planar codecs: exponents and sign-mantissa bytes apart, the exponents cut into K shards of rows that a
// general-purpose compressor encodes one by one (docs/format.md, "Planar codecs").
#pragma once
#include "codec/codec.hpp"

namespace zipmoe {

// Rows of shard `shard` of `shards`. Some are empty when there are more shards than rows.
RowRange shard_rows(uint64_t rows, uint64_t shards, uint64_t shard);

// The shard that holds `row`.
uint64_t shard_of_row(uint64_t rows, uint64_t shards, uint64_t row);

// Everything but the compressor, which a subclass supplies.
class PlanarCodec : public Codec {
 public:
  Capabilities capabilities() const final { return {.separable = true, .fused = false}; }
  std::span<const SectionKind> section_kinds() const final;
  EncodedMatrix encode(std::span<const uint16_t> weights, MatrixShape shape,
                       const EncodeParameters& parameters) const final;
  void validate(const MatrixView& matrix) const final;
  void decode_rows(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out,
                   InstructionSet instruction_set) const final;
  RowRange split_at(const MatrixView& matrix, uint64_t row) const final;
  std::optional<RowAccess> row_access(MatrixShape shape, std::span<const uint32_t> shard_bytes) const final;
  std::vector<SectionRange> row_ranges(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end) const final;

  // Decompresses one shard alone: fills `raw` (its rows * columns exponents) exactly, or throws FormatError. The codec
  // must be available.
  void decompress_exponents(std::span<const uint8_t> compressed, std::span<uint8_t> raw) const {
    decompress_shard(compressed, raw);
  }
  // The same for one shard of a matrix of which only the E section need be there; an empty shard is left alone.
  void decompress_shard_of(const MatrixView& matrix, uint32_t shard, std::span<uint8_t> raw) const;

 protected:
  // Upper bound of the compressed bytes of a shard. Throws std::invalid_argument for more than the library can take.
  virtual uint64_t compressed_bytes_max(uint64_t raw_bytes) const = 0;

  // Compresses `raw` (not empty) to the start of `out`, which has compressed_bytes_max() bytes; returns how many it
  // took.
  virtual uint64_t compress_shard(std::span<const uint8_t> raw, const EncodeParameters& parameters,
                                  std::span<uint8_t> out) const = 0;

  // Throws FormatError when `compressed` cannot be the form of `raw_bytes` bytes, as far as that is cheap to see.
  virtual void validate_shard(std::span<const uint8_t> compressed, uint64_t raw_bytes) const = 0;

  // Fills `raw` exactly, or throws FormatError.
  virtual void decompress_shard(std::span<const uint8_t> compressed, std::span<uint8_t> raw) const = 0;
};

}  // namespace zipmoe
