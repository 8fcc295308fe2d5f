// FX3: fixed-length exponent codes of 3 bits with escapes, computable in place (docs/format.md, "FX3").
#pragma once
#include "codec/codec.hpp"

namespace zipmoe {

class Fx3Codec final : public Codec {
 public:
  std::string_view name() const override { return "fx3"; }
  Capabilities capabilities() const override { return {.separable = false, .fused = true}; }
  std::span<const SectionKind> section_kinds() const override;
  EncodedMatrix encode(std::span<const uint16_t> weights, MatrixShape shape,
                       const EncodeParameters& parameters) const override;
  void validate(const MatrixView& matrix) const override;
  void decode_rows(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out,
                   InstructionSet instruction_set) const override;
  RowRange split_at(const MatrixView& matrix, uint64_t row) const override;
  std::optional<RowAccess> row_access(MatrixShape shape, std::span<const uint32_t> shard_bytes) const override;
  std::vector<SectionRange> row_ranges(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end) const override;
};

enum class Fx3RawFallback {
  when_smaller,  // the encoder's rule: raw when the codes would exceed .95 of the BF16 matrix
  never,         // for tests: codes whatever their size (fails with std::invalid_argument beyond 2^32 - 1 escapes)
};

// The blob of docs/format.md for `weights`, row-major.
std::vector<uint8_t> encode_fx3(std::span<const uint16_t> weights, MatrixShape shape, Fx3RawFallback fallback);

}  // namespace zipmoe
