// A matrix to compute with, where it lies: packed as FX3 or raw BF16.
#pragma once
#include <cstdint>
#include <optional>
#include <span>

#include "codec/codec.hpp"
#include "codec/fx3_layout.hpp"
#include "compute/row_tasks.hpp"
#include "compute/token_inputs.hpp"
#include "simd/gemv_kernels.hpp"

namespace zipmoe {

// Does not own the bytes. Both kinds give the same bits for the same weights.
class WeightMatrix {
 public:
  // An FX3 section (docs/format.md), packed or with the raw fallback. Checks the header against shape and length and
  // throws FormatError, std::invalid_argument for a shape that FX3 cannot hold. Any contents are memory safe; whether
  // they are intact is for the caller to know (checksum or Fx3Codec::validate).
  static WeightMatrix fx3(std::span<const uint8_t> section, MatrixShape shape);
  // Row-major BF16 patterns, rows * columns. Throws std::invalid_argument for a wrong length.
  static WeightMatrix bfloat16(std::span<const uint16_t> weights, MatrixShape shape);

  MatrixShape shape() const { return layout_.shape; }
  // Bytes that are read to compute with four rows: what work is divided by.
  uint64_t group_bytes() const { return group_bytes_; }

  // Sums of the products of the rows [row_begin, row_end) with inputs of some tokens, in fp32, canonical order
  // (gemv_kernels.hpp). Whole groups of four rows are computed, so `sums` is [tokens][stride] from row `row_begin / 4 *
  // 4` on, with space for every row of the groups that are touched. Returns the offset of row_begin in it.
  uint64_t multiply(const TokenInputs& inputs, TokenRange tokens, uint64_t row_begin, uint64_t row_end, float* sums,
                    uint64_t stride, const simd::GemvKernels& kernels) const;

  // For many tokens, with kernels that have `unpacked_tokens_min`: rows (and the others of their groups) are unpacked
  // to `unpacked_values` 16-bit values once, and multiplied with turn after turn. `upcoming`: what is read afterwards.
  uint64_t unpacked_values(uint64_t row_begin, uint64_t row_end) const;
  void unpack(uint64_t row_begin, uint64_t row_end, uint16_t* unpacked, const simd::GemvKernels& kernels) const;
  uint64_t multiply_unpacked(const uint16_t* unpacked, const TokenInputs& inputs, TokenRange tokens, uint64_t row_begin,
                             uint64_t row_end, float* sums, uint64_t stride, std::span<const uint8_t> upcoming,
                             const simd::GemvKernels& kernels) const;
  // What lies behind these rows (in the first panel), as many as these or as many as there are.
  std::span<const uint8_t> bytes_behind(uint64_t row_begin, uint64_t row_end) const;

 private:
  // Consecutive groups of four rows.
  struct Groups {
    uint64_t first;
    uint64_t count;

    uint64_t first_row() const { return first * simd::kFx3GroupRows; }
    uint64_t end() const { return first + count; }
  };

  static Groups groups_of(uint64_t row_begin, uint64_t row_end);
  simd::Fx3GemvRun fx3_run(uint64_t panel, Groups groups) const;
  void unpack_raw_group(uint64_t panel, uint64_t group, uint16_t* unpacked) const;
  explicit WeightMatrix(const Fx3Layout& layout) : layout_(layout) {}

  Fx3Layout layout_;  // the panels are part of the canonical order of raw matrices too
  std::optional<Fx3Header> header_;
  const uint8_t* section_ = nullptr;
  const uint16_t* weights_ = nullptr;
  uint64_t group_bytes_ = 0;
};

}  // namespace zipmoe
