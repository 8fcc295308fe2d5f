// FX3 decoding in portable C++: codes eight at a time in one 64-bit word, exponents two at a time from a table, and
// loops that the compiler can vectorise with what the baseline has.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "simd/fx3_record.hpp"
#include "simd/kernels.hpp"

namespace zipmoe::simd {
namespace {

static_assert(std::endian::native == std::endian::little, "the formats are little endian, and so are these kernels");

constexpr uint64_t kOnes = 0x0101010101010101;

// Exponents of two neighbouring codes, indexed by first code | second code << 3.
using PairTable = std::array<uint16_t, 64>;

PairTable make_pair_table(const uint8_t* exponents) {
  PairTable table;
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = static_cast<uint16_t>(exponents[i & 7] | exponents[i >> 3] << 8);
  }
  return table;
}

uint64_t load_u64(const uint8_t* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The exponents of one record in storage order; one more slot takes patches that are not needed.
using Exponents = std::array<uint8_t, kFx3BlockWeights + 8>;

// Gives the first of `escapes` its exponent and removes it from the set. An empty set patches the slot behind the
// others; written as a sum because a branch, which compilers make of std::countr_zero(0), would be mispredicted.
void patch(uint64_t& escapes, uint8_t exponent, Exponents& exponents) {
  const uint64_t none = escapes == 0 ? 1 : 0;
  const auto position = static_cast<uint64_t>(std::countr_zero(escapes | uint64_t{1} << 63));
  exponents[position + none] = exponent;
  escapes &= escapes - 1;
}

// Returns the exception pointer behind the consumed ones. Reads at most 64 bytes there.
const uint8_t* decode_exponents(const PairTable& table, const uint8_t* record, const uint8_t* exception,
                                Exponents& exponents) {
  const uint64_t high_bits = load_u64(record + kFx3HighBitsOffset);
  uint64_t escapes = 0;  // bit p: position p is an escape
#pragma GCC unroll 8
  for (uint64_t octet = 0; octet < 8; ++octet) {  // positions 8 * octet .. 8 * octet + 7
    const uint64_t low_bits = load_u64(record + kFx3LowBitsOffset + 8 * (octet & 1)) >> (2 * (octet >> 1));
    const uint64_t codes = (low_bits & (3 * kOnes)) | ((high_bits >> octet) & kOnes) << 2;
    const uint64_t pairs = codes | codes >> 5;
    uint64_t eight = 0;
    for (uint64_t shift = 0; shift < 64; shift += 16) eight |= uint64_t{table[(pairs >> shift) & 63]} << shift;
    std::memcpy(exponents.data() + 8 * octet, &eight, sizeof eight);
    const uint64_t sevens = codes & (codes >> 1) & (codes >> 2) & kOnes;
    escapes |= (sevens * 0x0102040810204080) >> 56 << (8 * octet);  // the multiplication gathers the low bits
  }
  const int count = std::popcount(escapes);
  // Most records have at most three escapes, so three are patched whether they exist or not.
  patch(escapes, exception[0], exponents);
  patch(escapes, exception[1], exponents);
  patch(escapes, exception[2], exponents);
  for (int i = 3; i < count; ++i) patch(escapes, exception[i], exponents);
  return exception + count;
}

void combine(const Exponents& exponents, const uint8_t* record, uint16_t* out) {
  // Through local arrays of fixed length, which the compiler knows not to overlap and vectorises.
  uint8_t sign_mantissa[kFx3BlockWeights];
  uint16_t words[kFx3BlockWeights];
  std::memcpy(sign_mantissa, record, sizeof sign_mantissa);
  for (uint64_t p = 0; p < kFx3BlockWeights; ++p) {
    words[p] = static_cast<uint16_t>(sign_mantissa[p] << 15 | exponents[p] << 7 | sign_mantissa[p] >> 1);
  }
  for (uint64_t p = 0; p < kFx3BlockWeights; p += 8) {
    std::memcpy(out + fx3_weight_of_position(p), words + p, 8 * sizeof(uint16_t));
  }
}

}  // namespace

void fx3_decode_scalar(const Fx3Run& run) {
  const PairTable table = make_pair_table(run.exponents);
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint8_t* record = run.records;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t index;
    std::memcpy(&index, run.index + sizeof index * group, sizeof index);
    const uint8_t* exception = run.exceptions + std::min<uint64_t>(index, run.exception_count);
    for (uint64_t block = 0; block < run.blocks; ++block) {
      std::array<Exponents, kFx3GroupRows> exponents;
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
        exception = decode_exponents(table, record + row * kFx3RecordBytes, exception, exponents[row]);
        exception = std::min(exception, exceptions_end);  // hostile records
      }
      const bool whole = block + 1 < run.blocks || run.last_block_columns == kFx3BlockWeights;
      for (uint64_t row = 0; row < kFx3GroupRows; ++row, record += kFx3RecordBytes) {
        uint16_t* out = run.out + (group * kFx3GroupRows + row) * run.out_stride + block * kFx3BlockWeights;
        if (whole) {
          combine(exponents[row], record, out);
        } else {
          uint16_t weights[kFx3BlockWeights];
          combine(exponents[row], record, weights);
          std::memcpy(out, weights, run.last_block_columns * sizeof(uint16_t));
        }
      }
    }
  }
}

}  // namespace zipmoe::simd
