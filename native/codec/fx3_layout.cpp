#include "codec/fx3_layout.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "codec/little_endian.hpp"

namespace zipmoe {
namespace {

constexpr uint32_t kMagic = 0x01335846;  // "FX3\1"
constexpr uint32_t kRawFlag = 1;
constexpr uint64_t kWeightsMax = uint64_t{1} << 48;

// Offsets of the header's fields.
constexpr uint64_t kMagicAt = 0;
constexpr uint64_t kFlagsAt = 4;
constexpr uint64_t kRowsAt = 8;
constexpr uint64_t kColumnsAt = 12;
constexpr uint64_t kPaddedColumnsAt = 16;
constexpr uint64_t kPanelColumnsAt = 20;
constexpr uint64_t kGroupRowsAt = 24;
constexpr uint64_t kExponentsAt = 25;
constexpr uint64_t kReservedAt = 33;
constexpr uint64_t kExceptionBytesAt = 40;
constexpr uint64_t kSecondReservedAt = 48;

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool all_zero(std::span<const uint8_t> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; });
}

void require(bool condition, const char* what) {
  if (!condition) throw FormatError(std::string("FX3: ") + what);
}

void require_field(std::span<const uint8_t> blob, uint64_t offset, uint64_t expected, const char* field) {
  const auto found = load_little_endian<uint32_t>(blob.data() + offset);
  if (found == expected) return;
  throw FormatError("FX3: the header's " + std::string(field) + " is " + std::to_string(found) + " instead of " +
                    std::to_string(expected));
}

}  // namespace

Fx3Layout Fx3Layout::of(MatrixShape shape) {
  constexpr uint64_t block = simd::kFx3BlockWeights;
  constexpr uint64_t side_max = std::numeric_limits<uint32_t>::max() - block;
  if (shape.rows == 0 || shape.columns == 0) throw std::invalid_argument("a matrix needs at least one row and column");
  if (shape.rows > side_max || shape.columns > side_max || shape.rows > kWeightsMax / shape.columns) {
    throw std::invalid_argument("the matrix is too large for FX3");
  }
  Fx3Layout layout{};
  layout.shape = shape;
  layout.padded_columns = round_up(shape.columns, block);
  const uint64_t row_blocks = layout.padded_columns / block;
  layout.blocks = std::min(row_blocks, kFx3PanelColumnsMax / block);
  while (row_blocks % layout.blocks != 0) --layout.blocks;  // the fewest panels of equal width
  layout.panel_columns = layout.blocks * block;
  layout.panels = row_blocks / layout.blocks;
  layout.groups = (shape.rows + simd::kFx3GroupRows - 1) / simd::kFx3GroupRows;
  layout.index_offset = kFx3HeaderBytes;
  layout.records_offset = layout.index_offset + round_up(layout.index_entries() * sizeof(uint32_t), kFx3Alignment);
  layout.exceptions_offset = layout.records_offset + layout.panels * layout.groups * layout.group_bytes();
  layout.exceptions_offset = round_up(layout.exceptions_offset, kFx3Alignment);
  return layout;
}

uint64_t Fx3Layout::coded_blob_bytes(uint64_t exception_bytes) const {
  return exceptions_offset + round_up(exception_bytes, kFx3Alignment) + kFx3TailBytes;
}

uint64_t Fx3Layout::raw_blob_bytes() const { return kFx3HeaderBytes + round_up(raw_bytes(), kFx3Alignment); }

bool Fx3Layout::prefers_raw(uint64_t exception_bytes) const {
  return exception_bytes > std::numeric_limits<uint32_t>::max() ||
         20 * coded_blob_bytes(exception_bytes) > 19 * raw_bytes();
}

void write_fx3_header(const Fx3Layout& layout, const Fx3Header& header, uint8_t* blob) {
  std::fill_n(blob, kFx3HeaderBytes, uint8_t{0});
  store_little_endian(blob + kMagicAt, kMagic);
  store_little_endian(blob + kFlagsAt, header.raw ? kRawFlag : 0);
  store_little_endian(blob + kRowsAt, static_cast<uint32_t>(layout.shape.rows));
  store_little_endian(blob + kColumnsAt, static_cast<uint32_t>(layout.shape.columns));
  store_little_endian(blob + kPaddedColumnsAt, static_cast<uint32_t>(layout.padded_columns));
  store_little_endian(blob + kPanelColumnsAt, static_cast<uint32_t>(layout.panel_columns));
  blob[kGroupRowsAt] = simd::kFx3GroupRows;
  std::copy(header.exponents.begin(), header.exponents.end(), blob + kExponentsAt);
  store_little_endian(blob + kExceptionBytesAt, header.exception_bytes);
}

Fx3Header read_fx3_header(std::span<const uint8_t> blob, const Fx3Layout& layout) {
  require(blob.size() >= kFx3HeaderBytes, "the section is shorter than a header");
  require_field(blob, kMagicAt, kMagic, "magic");
  const auto flags = load_little_endian<uint32_t>(blob.data() + kFlagsAt);
  require((flags & ~kRawFlag) == 0, "the header has unknown flags");
  require_field(blob, kRowsAt, layout.shape.rows, "number of rows");
  require_field(blob, kColumnsAt, layout.shape.columns, "number of columns");
  require_field(blob, kPaddedColumnsAt, layout.padded_columns, "padded number of columns");
  require_field(blob, kPanelColumnsAt, layout.panel_columns, "panel width");
  require(blob[kGroupRowsAt] == simd::kFx3GroupRows, "the header's row group is not 4 rows");
  require(all_zero(blob.subspan(kReservedAt, kExceptionBytesAt - kReservedAt)) &&
              all_zero(blob.subspan(kSecondReservedAt, kFx3HeaderBytes - kSecondReservedAt)),
          "reserved bytes of the header are not zero");

  Fx3Header header{};
  header.raw = (flags & kRawFlag) != 0;
  std::copy_n(blob.begin() + kExponentsAt, header.exponents.size(), header.exponents.begin());
  header.exception_bytes = load_little_endian<uint64_t>(blob.data() + kExceptionBytesAt);
  uint64_t expected_bytes = 0;
  if (header.raw) {
    require(all_zero(header.exponents) && header.exception_bytes == 0, "a raw matrix has no codes");
    expected_bytes = layout.raw_blob_bytes();
  } else {
    require(std::count(header.exponents.begin(), header.exponents.end() - 1, uint8_t{255}) == 0 &&
                header.exponents.back() == 255,
            "exponent 255 must belong to the escape code and to no other");
    require(header.exception_bytes <= std::numeric_limits<uint32_t>::max(), "too many exceptions");
    expected_bytes = layout.coded_blob_bytes(header.exception_bytes);
  }
  if (blob.size() != expected_bytes) {
    throw FormatError("FX3: the section has " + std::to_string(blob.size()) + " bytes instead of " +
                      std::to_string(expected_bytes));
  }
  return header;
}

}  // namespace zipmoe
