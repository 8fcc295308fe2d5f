#include "codec/codec.hpp"

namespace zipmoe {

std::string_view name(SectionKind kind) noexcept {
  switch (kind) {
    case SectionKind::packed:
      return "packed";
    case SectionKind::exponent:
      return "E";
    case SectionKind::sign_mantissa:
      return "SM";
  }
  return "unknown";
}

std::optional<RowAccess> Codec::row_access(MatrixShape, std::span<const uint32_t>) const { return std::nullopt; }

std::vector<SectionRange> Codec::row_ranges(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end) const {
  check_row_range(matrix.shape, row_begin, row_end);
  std::vector<SectionRange> ranges;
  for (uint32_t section = 0; section < section_kinds().size() && row_begin < row_end; ++section) {
    ranges.push_back({section, 0, matrix.sections[section].size()});
  }
  return ranges;
}

void check_encode_arguments(std::span<const uint16_t> weights, MatrixShape shape) {
  if (shape.rows == 0 || shape.columns == 0) throw std::invalid_argument("a matrix needs at least one row and column");
  if (weights.size() / shape.columns != shape.rows || weights.size() % shape.columns != 0) {
    throw std::invalid_argument("the number of weights does not match the shape");
  }
}

void check_row_range(MatrixShape shape, uint64_t row_begin, uint64_t row_end) {
  if (row_begin <= row_end && row_end <= shape.rows) return;
  throw std::invalid_argument("rows " + std::to_string(row_begin) + " to " + std::to_string(row_end) +
                              " do not lie in a matrix of " + std::to_string(shape.rows) + " rows");
}

}  // namespace zipmoe
