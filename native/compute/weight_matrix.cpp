#include "compute/weight_matrix.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace zipmoe {
namespace {

using simd::kFx3GroupRows;

static_assert(std::endian::native == std::endian::little, "raw weights are used as they lie");

}  // namespace

WeightMatrix WeightMatrix::fx3(std::span<const uint8_t> section, MatrixShape shape) {
  WeightMatrix matrix(Fx3Layout::of(shape));
  const Fx3Header header = read_fx3_header(section, matrix.layout_);
  if (header.raw) {
    const uint8_t* bytes = section.data() + kFx3HeaderBytes;
    if (reinterpret_cast<uintptr_t>(bytes) % alignof(uint16_t) != 0) {
      throw std::invalid_argument("an FX3 section must lie at an even address");
    }
    matrix.weights_ = reinterpret_cast<const uint16_t*>(bytes);
    matrix.group_bytes_ = kFx3GroupRows * shape.columns * sizeof(uint16_t);
  } else {
    matrix.section_ = section.data();
    matrix.header_ = header;
    matrix.group_bytes_ = matrix.layout_.panels * matrix.layout_.group_bytes();
  }
  return matrix;
}

WeightMatrix WeightMatrix::bfloat16(std::span<const uint16_t> weights, MatrixShape shape) {
  WeightMatrix matrix(Fx3Layout::of(shape));
  if (weights.size() != shape.rows * shape.columns) {
    throw std::invalid_argument("the weights do not have the length of their shape");
  }
  matrix.weights_ = weights.data();
  matrix.group_bytes_ = kFx3GroupRows * shape.columns * sizeof(uint16_t);
  return matrix;
}

WeightMatrix::Groups WeightMatrix::groups_of(uint64_t row_begin, uint64_t row_end) {
  const uint64_t first = row_begin / kFx3GroupRows;
  return {first, (row_end + kFx3GroupRows - 1) / kFx3GroupRows - first};
}

simd::Fx3GemvRun WeightMatrix::fx3_run(uint64_t panel, Groups groups) const {
  const uint64_t group = panel * layout_.groups + groups.first;
  return {
      .records = section_ + layout_.records_offset + group * layout_.group_bytes(),
      .index = section_ + layout_.index_offset + group * sizeof(uint32_t),
      .exceptions = section_ + layout_.exceptions_offset,
      .exception_count = header_->exception_bytes,
      .exponents = header_->exponents.data(),
      .groups = groups.count,
      .blocks = layout_.blocks,
      .inputs = {},
      .sums = nullptr,
      .sums_stride = 0,
      .add = panel > 0,
  };
}

uint64_t WeightMatrix::multiply(const TokenInputs& inputs, TokenRange tokens, uint64_t row_begin, uint64_t row_end,
                                float* sums, uint64_t stride, const simd::GemvKernels& kernels) const {
  const bool few = tokens.count() <= simd::kGemvTokensMax;
  const Groups groups = groups_of(row_begin, row_end);
  const uint64_t first_row = groups.first_row();
  if (weights_ != nullptr) {
    const auto bfloat16 = few ? kernels.bfloat16 : kernels.bfloat16_many;
    bfloat16(simd::BFloat16GemvRun{
        .weights = weights_ + first_row * layout_.shape.columns,
        .rows = std::min(groups.count * kFx3GroupRows, layout_.shape.rows - first_row),
        .columns = layout_.shape.columns,
        .panel_columns = layout_.panel_columns,
        .inputs = inputs.from(0, tokens.begin, tokens.end),
        .sums = sums,
        .sums_stride = stride,
    });
    return row_begin - first_row;
  }
  const auto fx3 = few ? kernels.fx3 : kernels.fx3_many;
  for (uint64_t panel = 0; panel < layout_.panels; ++panel) {
    simd::Fx3GemvRun run = fx3_run(panel, groups);
    run.inputs = inputs.from(panel, tokens.begin, tokens.end);
    run.sums = sums;
    run.sums_stride = stride;
    fx3(run);
  }
  return row_begin - first_row;
}

uint64_t WeightMatrix::unpacked_values(uint64_t row_begin, uint64_t row_end) const {
  return groups_of(row_begin, row_end).count * kFx3GroupRows * layout_.padded_columns;
}

void WeightMatrix::unpack(uint64_t row_begin, uint64_t row_end, uint16_t* unpacked,
                          const simd::GemvKernels& kernels) const {
  const Groups groups = groups_of(row_begin, row_end);
  const uint64_t group_values = kFx3GroupRows * layout_.panel_columns;
  for (uint64_t panel = 0; panel < layout_.panels; ++panel) {
    if (weights_ == nullptr) {
      kernels.fx3_unpack(fx3_run(panel, groups), unpacked);
      unpacked += groups.count * group_values;
      continue;
    }
    for (uint64_t group = groups.first; group < groups.end(); ++group, unpacked += group_values) {
      unpack_raw_group(panel, group, unpacked);
    }
  }
}

void WeightMatrix::unpack_raw_group(uint64_t panel, uint64_t group, uint16_t* unpacked) const {
  constexpr uint64_t block_values = simd::kFx3BlockWeights;
  const auto [rows, columns] = layout_.shape;
  for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
    // Rows behind the last one are copies of it, whose sums nobody looks at.
    const uint16_t* weights = weights_ + std::min(group * kFx3GroupRows + row, rows - 1) * columns;
    uint16_t* out = unpacked + row * block_values;
    for (uint64_t block = 0; block < layout_.blocks; ++block, out += kFx3GroupRows * block_values) {
      const uint64_t column = panel * layout_.panel_columns + block * block_values;
      if (column + block_values <= columns) {
        std::memcpy(out, weights + column, block_values * sizeof(uint16_t));
      } else {
        const uint64_t left = column < columns ? columns - column : 0;
        std::copy_n(weights + (columns - left), left, out);
        std::fill(out + left, out + block_values, uint16_t{0});
      }
    }
  }
}

uint64_t WeightMatrix::multiply_unpacked(const uint16_t* unpacked, const TokenInputs& inputs, TokenRange tokens,
                                         uint64_t row_begin, uint64_t row_end, float* sums, uint64_t stride,
                                         std::span<const uint8_t> upcoming, const simd::GemvKernels& kernels) const {
  const Groups groups = groups_of(row_begin, row_end);
  kernels.unpacked(simd::UnpackedGemvRun{
      .weights = unpacked,
      .panels = layout_.panels,
      .groups = groups.count,
      .blocks = layout_.blocks,
      .inputs = inputs.from(0, tokens.begin, tokens.end),
      .sums = sums,
      .sums_stride = stride,
      .upcoming = upcoming.data(),
      .upcoming_bytes = upcoming.size(),
  });
  return row_begin - groups.first_row();
}

std::span<const uint8_t> WeightMatrix::bytes_behind(uint64_t row_begin, uint64_t row_end) const {
  const Groups groups = groups_of(row_begin, row_end);
  const Groups next{groups.end(), std::min(groups.count, layout_.groups - groups.end())};
  if (weights_ == nullptr) return {fx3_run(0, next).records, next.count * layout_.group_bytes()};
  const uint64_t first_row = std::min(next.first_row(), layout_.shape.rows);
  const uint64_t rows = std::min(next.count * kFx3GroupRows, layout_.shape.rows - first_row);
  const uint64_t row_bytes = layout_.shape.columns * sizeof(uint16_t);
  return {reinterpret_cast<const uint8_t*>(weights_) + first_row * row_bytes, rows * row_bytes};
}

}  // namespace zipmoe
