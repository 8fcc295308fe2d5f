#include "runtime/record_verifier.hpp"

#include <chrono>
#include <string>

#include "codec/checksum.hpp"

namespace zipmoe {
namespace {

std::string hexadecimal(uint64_t value) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = digits[value & 15];
  return text;
}

}  // namespace

RecordVerifier::RecordVerifier(const RecordTable& table, VerifyMode mode)
    : table_(table), mode_(mode), trusted_(std::make_unique<std::atomic<bool>[]>(kParts * table.size())) {}

void RecordVerifier::verify(RecordIndex record, const uint8_t* data) {
  verify(record, table_.places(record, data), {true, true});
}

bool RecordVerifier::wants_checksum(RecordIndex record, size_t part) const {
  return mode_ == VerifyMode::always ||
         (mode_ == VerifyMode::first && !trusted(record, part).load(std::memory_order_acquire));
}

void RecordVerifier::verify(RecordIndex record, const PartPlaces& places, const std::array<bool, 2>& fresh,
                            const Checksums& checksums) {
  const auto begin = std::chrono::steady_clock::now();
  for (size_t part = 0; part < table_[record].extents.size(); ++part) {
    if (!fresh[part]) continue;
    const bool seen = trusted(record, part).load(std::memory_order_acquire);
    const bool checksum = wants_checksum(record, part);
    if (checksum) {
      check_extent(record, part,
                   checksums[part] ? *checksums[part] : xxh3_64({places[part], table_[record].extents[part].length}));
    }
    if (part == 0 && (!seen || !checksum)) validate_matrices(record, places);
    trusted(record, part).store(true, std::memory_order_release);
  }
  const auto elapsed = std::chrono::steady_clock::now() - begin;
  nanoseconds_.fetch_add(static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count()),
                         std::memory_order_relaxed);
}

void RecordVerifier::check_extent(RecordIndex record, size_t part, uint64_t found) const {
  const Extent& extent = table_[record].extents[part];
  if (found == extent.xxh3_64) return;
  throw RecordError(RecordFault::checksum_mismatch, record,
                    "checksum " + hexadecimal(found) + " instead of " + hexadecimal(extent.xxh3_64) + " over the " +
                        std::to_string(extent.length) + " bytes at offset " +
                        std::to_string(table_[record].offset + extent.offset) + " (extent " +
                        std::string(name(table_.codec().section_kinds()[part])) + ")");
}

void RecordVerifier::validate_matrices(RecordIndex record, const PartPlaces& places) const {
  const auto matrices = static_cast<uint32_t>(table_[record].matrices.size());
  for (uint32_t matrix = 0; matrix < matrices; ++matrix) {
    try {
      table_.codec().validate(table_.view(record, matrix, places));
    } catch (const FormatError& error) {
      throw RecordError(RecordFault::invalid_encoding, record,
                        "matrix " + std::to_string(matrix) + ": " + error.what());
    }
  }
}

}  // namespace zipmoe
