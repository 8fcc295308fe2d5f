// Decides what is checked before the bytes of a record may be used, and checks it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "runtime/record_error.hpp"
#include "runtime/record_table.hpp"

namespace zipmoe {

// When checksums are computed: at every read, at the first read of a record, or never.
enum class VerifyMode : uint8_t { always, first, never };

class RecordVerifier {
 public:
  RecordVerifier(const RecordTable& table, VerifyMode mode);

  // Throws RecordError. Afterwards decoding the record is memory safe. The codec validates a record at its first read,
  // and at every read that comes without checksums. Thread-safe for different records and for different parts of one.
  void verify(RecordIndex record, const uint8_t* data);
  // The same when only some parts (`fresh`, by extent) have just been read. The others have their places, but perhaps
  // not yet their bytes: what there is to validate is in the first part.
  void verify(RecordIndex record, const PartPlaces& places, const std::array<bool, 2>& fresh) {
    verify(record, places, fresh, {});
  }
  // The same with checksums that were computed while the parts arrived; the others are computed now.
  using Checksums = std::array<std::optional<uint64_t>, 2>;
  void verify(RecordIndex record, const PartPlaces& places, const std::array<bool, 2>& fresh,
              const Checksums& checksums);

  // Whether the next read of this part will be verified by its checksum.
  bool wants_checksum(RecordIndex record, size_t part) const;
  // Time that was spent on checksums elsewhere.
  void count_nanoseconds(uint64_t nanoseconds) { nanoseconds_.fetch_add(nanoseconds, std::memory_order_relaxed); }
  double seconds() const { return static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) * 1e-9; }

 private:
  void check_extent(RecordIndex record, size_t part, uint64_t found) const;
  std::atomic<bool>& trusted(RecordIndex record, size_t part) const { return trusted_[record * kParts + part]; }
  void validate_matrices(RecordIndex record, const PartPlaces& places) const;

  static constexpr size_t kParts = 2;

  const RecordTable& table_;
  const VerifyMode mode_;
  std::unique_ptr<std::atomic<bool>[]> trusted_;  // by record and part: read, checked and validated once
  std::atomic<uint64_t> nanoseconds_ = 0;
};

}  // namespace zipmoe
