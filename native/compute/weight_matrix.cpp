#include "compute/weight_matrix.hpp"

#include <algorithm>
#include <bit>
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

uint64_t WeightMatrix::multiply(const TokenInputs& inputs, TokenRange tokens, uint64_t row_begin, uint64_t row_end,
                                float* sums, uint64_t stride, const simd::GemvKernels& kernels) const {
  const bool few = tokens.count() <= simd::kGemvTokensMax;
  const uint64_t first_group = row_begin / kFx3GroupRows;
  const uint64_t groups = (row_end + kFx3GroupRows - 1) / kFx3GroupRows - first_group;
  const uint64_t first_row = first_group * kFx3GroupRows;
  if (weights_ != nullptr) {
    const auto bfloat16 = few ? kernels.bfloat16 : kernels.bfloat16_many;
    bfloat16(simd::BFloat16GemvRun{
        .weights = weights_ + first_row * layout_.shape.columns,
        .rows = std::min(groups * kFx3GroupRows, layout_.shape.rows - first_row),
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
    const uint64_t group = panel * layout_.groups + first_group;
    fx3(simd::Fx3GemvRun{
        .records = section_ + layout_.records_offset + group * layout_.group_bytes(),
        .index = section_ + layout_.index_offset + group * sizeof(uint32_t),
        .exceptions = section_ + layout_.exceptions_offset,
        .exception_count = header_->exception_bytes,
        .exponents = header_->exponents.data(),
        .groups = groups,
        .blocks = layout_.blocks,
        .inputs = inputs.from(panel * layout_.panel_columns, tokens.begin, tokens.end),
        .sums = sums,
        .sums_stride = stride,
        .add = panel > 0,
    });
  }
  return row_begin - first_row;
}

}  // namespace zipmoe
