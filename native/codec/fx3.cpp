#include "codec/fx3.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "codec/fx3_layout.hpp"
#include "codec/little_endian.hpp"
#include "simd/kernels.hpp"

namespace zipmoe {
namespace {

using simd::kFx3BlockWeights;
using simd::kFx3GroupRows;
using simd::kFx3RecordBytes;

constexpr std::array kSectionKinds = {SectionKind::packed};

Fx3Layout layout_of(const MatrixView& matrix) {
  try {
    return Fx3Layout::of(matrix.shape);
  } catch (const std::invalid_argument& error) {
    throw FormatError(std::string("FX3: ") + error.what());
  }
}

// Escape codes (7) among the 64 codes of a record.
uint64_t count_escapes(const uint8_t* record) {
  // Bits 0 and 1 of the code of position p lie at bits 2 * (p >> 4) of byte p & 15, bit 2 at bit p >> 3 of byte p & 7:
  // the pairs of bytes 0..7 meet the even bits of the third plane, those of bytes 8..15 the odd ones.
  constexpr uint64_t even_bits = 0x5555555555555555;
  const auto first = load_little_endian<uint64_t>(record + simd::kFx3LowBitsOffset);
  const auto second = load_little_endian<uint64_t>(record + simd::kFx3LowBitsOffset + 8);
  const auto high = load_little_endian<uint64_t>(record + simd::kFx3HighBitsOffset);
  const uint64_t threes = (first & (first >> 1) & even_bits) | (second & (second >> 1) & even_bits) << 1;
  return static_cast<uint64_t>(std::popcount(threes & high));
}

void require_zero(std::span<const uint8_t> bytes, const char* what) {
  if (std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; })) return;
  throw FormatError(std::string("FX3: padding behind the ") + what + " is not zero");
}

void check_index_and_escapes(std::span<const uint8_t> blob, const Fx3Layout& layout, const Fx3Header& header) {
  const uint64_t groups = layout.panels * layout.groups;
  const uint8_t* index = blob.data() + layout.index_offset;
  const uint8_t* record = blob.data() + layout.records_offset;
  auto begin = load_little_endian<uint32_t>(index);
  if (begin != 0) throw FormatError("FX3: the exception index does not start at 0");
  for (uint64_t group = 0; group < groups; ++group) {
    const auto end = load_little_endian<uint32_t>(index + sizeof(uint32_t) * (group + 1));
    if (end < begin) throw FormatError("FX3: the exception index decreases at group " + std::to_string(group));
    uint64_t escapes = 0;
    for (uint64_t i = 0; i < layout.blocks * kFx3GroupRows; ++i, record += kFx3RecordBytes) {
      escapes += count_escapes(record);
    }
    if (escapes != end - begin) {
      throw FormatError("FX3: group " + std::to_string(group) + " has " + std::to_string(escapes) +
                        " escape codes but " + std::to_string(end - begin) + " exceptions");
    }
    begin = end;
  }
  if (begin != header.exception_bytes) throw FormatError("FX3: the exception index does not end at the last exception");
}

// The rows of one panel, decoded by one kernel.
struct PanelDecoder {
  std::span<const uint8_t> blob;
  const Fx3Layout& layout;
  const Fx3Header& header;
  simd::Fx3Decode decode;
  uint64_t panel;

  uint64_t columns() const {
    return std::min(layout.panel_columns, layout.shape.columns - panel * layout.panel_columns);
  }

  void decode_groups(uint64_t first_group, uint64_t groups, uint16_t* out, uint64_t out_stride) const {
    const uint64_t group = panel * layout.groups + first_group;
    decode(simd::Fx3Run{
        .records = blob.data() + layout.records_offset + group * layout.group_bytes(),
        .index = blob.data() + layout.index_offset + group * sizeof(uint32_t),
        .exceptions = blob.data() + layout.exceptions_offset,
        .exception_count = header.exception_bytes,
        .exponents = header.exponents.data(),
        .groups = groups,
        .blocks = layout.blocks,
        .last_block_columns = columns() - (layout.blocks - 1) * kFx3BlockWeights,
        .out = out,
        .out_stride = out_stride,
    });
  }

  // Rows [begin, end) of one group that is not wanted, or does not exist, as a whole. `out` belongs to row `begin`.
  void decode_part_of_group(uint64_t begin, uint64_t end, uint16_t* out, uint64_t out_stride) const {
    alignas(64) std::array<uint16_t, kFx3GroupRows * kFx3PanelColumnsMax> rows;
    decode_groups(begin / kFx3GroupRows, 1, rows.data(), layout.panel_columns);
    for (uint64_t row = begin; row < end; ++row) {
      std::memcpy(out + (row - begin) * out_stride, rows.data() + row % kFx3GroupRows * layout.panel_columns,
                  columns() * sizeof(uint16_t));
    }
  }

  void decode_rows(uint64_t begin, uint64_t end, uint16_t* out, uint64_t out_stride) const {
    uint64_t row = begin;
    while (row < end) {
      const uint64_t whole_groups = row % kFx3GroupRows == 0 ? (end - row) / kFx3GroupRows : 0;
      uint64_t next = row + whole_groups * kFx3GroupRows;
      uint16_t* target = out + (row - begin) * out_stride;
      if (whole_groups > 0) {
        decode_groups(row / kFx3GroupRows, whole_groups, target, out_stride);
      } else {
        next = std::min(end, (row / kFx3GroupRows + 1) * kFx3GroupRows);
        decode_part_of_group(row, next, target, out_stride);
      }
      row = next;
    }
  }
};

}  // namespace

std::span<const SectionKind> Fx3Codec::section_kinds() const { return kSectionKinds; }

EncodedMatrix Fx3Codec::encode(std::span<const uint16_t> weights, MatrixShape shape,
                               const EncodeParameters& parameters) const {
  if (parameters.shards != 1) throw std::invalid_argument("FX3 has no shards: the number of shards must be 1");
  EncodedMatrix encoded;
  encoded.sections.push_back({SectionKind::packed, encode_fx3(weights, shape, Fx3RawFallback::when_smaller)});
  return encoded;
}

void Fx3Codec::validate(const MatrixView& matrix) const {
  if (!matrix.sections[1].empty() || !matrix.shard_bytes.empty()) throw FormatError("FX3: has one section, no shards");
  const std::span<const uint8_t> blob = matrix.sections[0];
  const Fx3Layout layout = layout_of(matrix);
  const Fx3Header header = read_fx3_header(blob, layout);
  if (header.raw) {
    require_zero(blob.subspan(kFx3HeaderBytes + layout.raw_bytes()), "matrix");
    return;
  }
  check_index_and_escapes(blob, layout, header);
  const uint64_t index_end = layout.index_offset + layout.index_entries() * sizeof(uint32_t);
  const uint64_t records_end = layout.records_offset + layout.panels * layout.groups * layout.group_bytes();
  require_zero(blob.subspan(index_end, layout.records_offset - index_end), "index");
  require_zero(blob.subspan(records_end, layout.exceptions_offset - records_end), "records");
  require_zero(blob.subspan(layout.exceptions_offset + header.exception_bytes), "exceptions");
}

void Fx3Codec::decode_rows(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out,
                           InstructionSet instruction_set) const {
  check_row_range(matrix.shape, row_begin, row_end);
  const std::span<const uint8_t> blob = matrix.sections[0];
  const Fx3Layout layout = layout_of(matrix);
  // The header is checked again because it decides where the kernels read; everything else they check themselves.
  const Fx3Header header = read_fx3_header(blob, layout);
  const uint64_t columns = matrix.shape.columns;
  if (header.raw) {
    if (row_begin == row_end) return;
    std::memcpy(out, blob.data() + kFx3HeaderBytes + row_begin * columns * sizeof(uint16_t),
                (row_end - row_begin) * columns * sizeof(uint16_t));
    return;
  }
  const simd::Fx3Decode decode = simd::kernels(instruction_set).fx3_decode;
  for (uint64_t panel = 0; panel < layout.panels; ++panel) {
    PanelDecoder{blob, layout, header, decode, panel}.decode_rows(row_begin, row_end,
                                                                  out + panel * layout.panel_columns, columns);
  }
}

std::optional<RowAccess> Fx3Codec::row_access(MatrixShape shape, std::span<const uint32_t>) const {
  const Fx3Layout layout = Fx3Layout::of(shape);
  // Every weight of a group may be an exception. The raw fallback has less: no index, and one row alone.
  const uint64_t group_bytes_max = layout.group_bytes() + kFx3GroupRows * layout.panel_columns;
  return RowAccess{.index_bytes = layout.index_offset + layout.index_entries() * sizeof(uint32_t),
                   .row_bytes_max = layout.panels * group_bytes_max,
                   .ranges_max = 2 * layout.panels,
                   .details_offset = layout.exceptions_offset};
}

std::vector<SectionRange> Fx3Codec::row_ranges(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end) const {
  check_row_range(matrix.shape, row_begin, row_end);
  std::vector<SectionRange> ranges;
  if (row_begin == row_end) return ranges;
  const std::span<const uint8_t> blob = matrix.sections[0];
  const Fx3Layout layout = layout_of(matrix);
  const Fx3Header header = read_fx3_header(blob, layout);
  if (header.raw) {
    const uint64_t row_bytes = matrix.shape.columns * sizeof(uint16_t);
    ranges.push_back({0, kFx3HeaderBytes + row_begin * row_bytes, kFx3HeaderBytes + row_end * row_bytes});
    return ranges;
  }
  const auto exception = [&](uint64_t group) {
    const uint8_t* entry = blob.data() + layout.index_offset + group * sizeof(uint32_t);
    return layout.exceptions_offset + std::min<uint64_t>(load_little_endian<uint32_t>(entry), header.exception_bytes);
  };
  for (uint64_t panel = 0; panel < layout.panels; ++panel) {
    const uint64_t begin = panel * layout.groups + row_begin / kFx3GroupRows;
    const uint64_t end = panel * layout.groups + (row_end - 1) / kFx3GroupRows + 1;
    ranges.push_back(
        {0, layout.records_offset + begin * layout.group_bytes(), layout.records_offset + end * layout.group_bytes()});
    ranges.push_back({0, exception(begin), exception(end)});
  }
  return ranges;
}

RowRange Fx3Codec::split_at(const MatrixView& matrix, uint64_t row) const {
  check_row_range(matrix.shape, row, row + 1);
  const uint64_t begin = row / kFx3GroupRows * kFx3GroupRows;
  return {begin, std::min(begin + kFx3GroupRows, matrix.shape.rows)};
}

}  // namespace zipmoe
