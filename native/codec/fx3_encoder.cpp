// FX3 encoding: one pass for the histogram, which also gives the exact size, and one that writes the records.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "codec/fx3.hpp"
#include "codec/fx3_layout.hpp"
#include "codec/little_endian.hpp"

namespace zipmoe {
namespace {

using simd::kFx3BlockWeights;
using simd::kFx3EscapeCode;
using simd::kFx3GroupRows;
using simd::kFx3HighBitsOffset;
using simd::kFx3LowBitsOffset;
using simd::kFx3RecordBytes;

constexpr uint64_t kOnes = 0x0101010101010101;
constexpr size_t kExponents = 256;
constexpr size_t kInfinity = 255;  // exponent of infinities and NaNs
constexpr size_t kCodes = 7;       // codes that stand for an exponent

using Histogram = std::array<uint64_t, kExponents>;

constexpr uint8_t exponent_of(uint16_t weight) { return static_cast<uint8_t>(weight >> 7); }

// Counts what the records will hold: the weights and the zeros that pad them.
Histogram count_exponents(std::span<const uint16_t> weights, const Fx3Layout& layout) {
  // Four tables, so that equal neighbours do not wait for each other's increment.
  std::array<Histogram, 4> partial{};
  size_t i = 0;
  for (; i + 4 <= weights.size(); i += 4) {
    for (size_t j = 0; j < 4; ++j) ++partial[j][exponent_of(weights[i + j])];
  }
  for (; i < weights.size(); ++i) ++partial[0][exponent_of(weights[i])];
  Histogram histogram{};
  for (size_t e = 0; e < kExponents; ++e) {
    for (const Histogram& each : partial) histogram[e] += each[e];
  }
  histogram[0] += layout.groups * kFx3GroupRows * layout.padded_columns - weights.size();
  return histogram;
}

struct CodeTable {
  std::array<uint8_t, kCodes + 1> exponents;  // of each code
  std::array<uint8_t, kExponents> codes;      // of each exponent
  uint64_t exception_bytes;                   // escapes that a matrix with this histogram needs
};

CodeTable choose_codes(const Histogram& histogram) {
  CodeTable table{};
  table.codes.fill(kFx3EscapeCode);
  Histogram left = histogram;
  left[kInfinity] = 0;
  size_t used = 0;
  for (; used < kCodes; ++used) {
    const auto most = std::max_element(left.begin(), left.end());  // the smallest exponent among equals
    if (*most == 0) break;
    const auto exponent = static_cast<uint8_t>(most - left.begin());
    table.exponents[used] = exponent;
    table.codes[exponent] = static_cast<uint8_t>(used);
    *most = 0;
  }
  std::fill(table.exponents.begin() + used, table.exponents.end(), table.exponents[0]);  // unused entries repeat
  table.exponents[kFx3EscapeCode] = kInfinity;
  for (size_t e = 0; e < kExponents; ++e) {
    if (table.codes[e] == kFx3EscapeCode) table.exception_bytes += histogram[e];
  }
  return table;
}

// Writes one record of 64 weights and returns the exception pointer behind the ones it appended.
uint8_t* encode_record(const CodeTable& table, const uint16_t* weights, uint8_t* record, uint8_t* exception) {
  uint64_t low_bits[2] = {0, 0};
  uint64_t high_bits = 0;
  for (uint64_t octet = 0; octet < 8; ++octet) {  // positions 8 * octet .. 8 * octet + 7
    const uint16_t* run = weights + simd::fx3_weight_of_position(8 * octet);
    uint64_t codes = 0;
    for (uint64_t i = 0; i < 8; ++i) {
      record[8 * octet + i] = static_cast<uint8_t>(run[i] << 1 | run[i] >> 15);
      codes |= uint64_t{table.codes[exponent_of(run[i])]} << (8 * i);
    }
    low_bits[octet & 1] |= (codes & (3 * kOnes)) << (2 * (octet >> 1));
    high_bits |= ((codes >> 2) & kOnes) << octet;
    uint64_t escapes = codes & (codes >> 1) & (codes >> 2) & kOnes;
    for (; escapes != 0; escapes &= escapes - 1) *exception++ = exponent_of(run[std::countr_zero(escapes) / 8]);
  }
  store_little_endian(record + kFx3LowBitsOffset, low_bits[0]);
  store_little_endian(record + kFx3LowBitsOffset + sizeof(uint64_t), low_bits[1]);
  store_little_endian(record + kFx3HighBitsOffset, high_bits);
  return exception;
}

void encode_records(const Fx3Layout& layout, const CodeTable& table, const uint16_t* weights, uint8_t* blob) {
  const uint64_t rows = layout.shape.rows;
  const uint64_t columns = layout.shape.columns;
  uint8_t* index = blob + layout.index_offset;
  uint8_t* record = blob + layout.records_offset;
  uint8_t* const exceptions = blob + layout.exceptions_offset;
  uint8_t* exception = exceptions;
  const auto append_index = [&] {
    store_little_endian(index, static_cast<uint32_t>(exception - exceptions));
    index += sizeof(uint32_t);
  };
  for (uint64_t panel = 0; panel < layout.panels; ++panel) {
    for (uint64_t group = 0; group < layout.groups; ++group) {
      append_index();
      for (uint64_t block = 0; block < layout.blocks; ++block) {
        const uint64_t column = panel * layout.panel_columns + block * kFx3BlockWeights;
        for (uint64_t row = group * kFx3GroupRows; row < (group + 1) * kFx3GroupRows; ++row) {
          if (row < rows && column + kFx3BlockWeights <= columns) {
            exception = encode_record(table, weights + row * columns + column, record, exception);
          } else {
            std::array<uint16_t, kFx3BlockWeights> padded{};
            if (row < rows) std::copy_n(weights + row * columns + column, columns - column, padded.begin());
            exception = encode_record(table, padded.data(), record, exception);
          }
          record += kFx3RecordBytes;
        }
      }
    }
  }
  append_index();
}

}  // namespace

std::vector<uint8_t> encode_fx3(std::span<const uint16_t> weights, MatrixShape shape, Fx3RawFallback fallback) {
  check_encode_arguments(weights, shape);
  const Fx3Layout layout = Fx3Layout::of(shape);
  const CodeTable table = choose_codes(count_exponents(weights, layout));
  if (fallback == Fx3RawFallback::when_smaller && layout.prefers_raw(table.exception_bytes)) {
    std::vector<uint8_t> blob(layout.raw_blob_bytes());
    write_fx3_header(layout, {.raw = true, .exponents = {}, .exception_bytes = 0}, blob.data());
    std::memcpy(blob.data() + kFx3HeaderBytes, weights.data(), weights.size_bytes());
    return blob;
  }
  if (table.exception_bytes > UINT32_MAX) throw std::invalid_argument("the matrix has too many escapes for FX3 codes");
  std::vector<uint8_t> blob(layout.coded_blob_bytes(table.exception_bytes));
  write_fx3_header(layout, {.raw = false, .exponents = table.exponents, .exception_bytes = table.exception_bytes},
                   blob.data());
  encode_records(layout, table, weights.data(), blob.data());
  return blob;
}

}  // namespace zipmoe
