// FX3 decoding in portable C++: eight codes at a time in one 64-bit word.
#include <algorithm>
#include <bit>
#include <cstring>

#include "simd/fx3_record.hpp"
#include "simd/kernels.hpp"

namespace zipmoe::simd {
namespace {

static_assert(std::endian::native == std::endian::little, "the formats are little endian, and so are these kernels");

constexpr uint64_t kOnes = 0x0101010101010101;

uint64_t load_u64(const uint8_t* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

uint16_t combine(uint32_t exponent, uint32_t sign_mantissa) {
  const auto word = static_cast<uint16_t>(exponent << 8 | sign_mantissa);
  return std::rotr(word, 1);
}

// Decodes 64 weights to `out` and returns the exception pointer behind the consumed ones.
const uint8_t* decode_record(const uint8_t* record, const uint8_t* exception, const uint8_t* exponents, uint16_t* out) {
  const uint64_t high_bits = load_u64(record + kFx3HighBitsOffset);
  for (uint64_t octet = 0; octet < 8; ++octet) {  // positions 8 * octet .. 8 * octet + 7
    const uint64_t low_bits = load_u64(record + kFx3LowBitsOffset + 8 * (octet & 1)) >> (2 * (octet >> 1));
    const uint64_t codes = (low_bits & (3 * kOnes)) | ((high_bits >> octet) & kOnes) << 2;
    const uint8_t* sign_mantissa = record + 8 * octet;
    uint16_t* run = out + fx3_weight_of_position(8 * octet);
    for (uint64_t i = 0; i < 8; ++i) run[i] = combine(exponents[(codes >> (8 * i)) & 7], sign_mantissa[i]);
    uint64_t escapes = codes & (codes >> 1) & (codes >> 2) & kOnes;
    for (; escapes != 0; escapes &= escapes - 1) {
      const int i = std::countr_zero(escapes) / 8;
      run[i] = combine(*exception++, sign_mantissa[i]);
    }
  }
  return exception;
}

}  // namespace

void fx3_decode_scalar(const Fx3Run& run) {
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint8_t* record = run.records;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t first_exception;
    std::memcpy(&first_exception, run.index + sizeof first_exception * group, sizeof first_exception);
    const uint8_t* exception = run.exceptions + std::min<uint64_t>(first_exception, run.exception_count);
    uint16_t* out = run.out + group * kFx3GroupRows * run.out_stride;
    for (uint64_t block = 0; block < run.blocks; ++block) {
      const bool whole = block + 1 < run.blocks || run.last_block_columns == kFx3BlockWeights;
      for (uint64_t row = 0; row < kFx3GroupRows; ++row, record += kFx3RecordBytes) {
        uint16_t* target = out + row * run.out_stride + block * kFx3BlockWeights;
        if (whole) {
          exception = decode_record(record, exception, run.exponents, target);
        } else {
          uint16_t weights[kFx3BlockWeights];
          exception = decode_record(record, exception, run.exponents, weights);
          std::memcpy(target, weights, run.last_block_columns * sizeof(uint16_t));
        }
        exception = std::min(exception, exceptions_end);  // hostile records; one record reads at most 64 beyond
      }
    }
  }
}

}  // namespace zipmoe::simd
