// The interface of a codec: how one BF16 matrix becomes sections of bytes, and how rows of it come back bit for bit.
// docs/format.md describes the sections, docs/adding_a_codec.md what a new codec has to do.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "simd/instruction_set.hpp"

namespace zipmoe {

// The bytes are not a valid encoding of a matrix of the given shape. The message says what is wrong with them.
class FormatError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// No codec has this name, or its library was missing when this program was built.
class UnknownCodec : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// What a section holds. Sections of one kind of all matrices of a record form an extent, which can be read alone.
enum class SectionKind : uint8_t {
  packed,         // "packed": everything
  exponent,       // "E": compressed exponent bytes, shard after shard
  sign_mantissa,  // "SM": sign and mantissa bytes, uncompressed
};

// The name that the manifest uses.
std::string_view name(SectionKind kind) noexcept;

struct Capabilities {
  bool separable;  // exponents and sign-mantissa bytes can live apart (two sections, each useful alone)
  bool fused;      // fixed-length layout: kernels can compute on it without reconstructing the matrix first
};

struct MatrixShape {
  uint64_t rows;
  uint64_t columns;
};

struct RowRange {
  uint64_t begin;
  uint64_t end;
};

struct EncodeParameters {
  int level;          // the codec's own scale; ignored by codecs without levels
  bool huffman_only;  // zstd: no match finding, entropy coding only; ignored by the others
  uint32_t shards;    // K >= 1; codecs without shards accept 1 only
};

struct EncodedSection {
  SectionKind kind;
  std::vector<uint8_t> bytes;
};

struct EncodedMatrix {
  std::vector<EncodedSection> sections;  // in the order of Codec::section_kinds()
  std::vector<uint32_t> shard_bytes;     // compressed bytes of each shard; empty for codecs without shards
};

// One encoded matrix in memory. `sections` are in the order of Codec::section_kinds(); unused ones are empty.
struct MatrixView {
  MatrixShape shape;
  std::array<std::span<const uint8_t>, 2> sections;
  std::span<const uint32_t> shard_bytes;
};

// Bytes [begin, end) of one section.
struct SectionRange {
  uint32_t section;
  uint64_t begin;
  uint64_t end;
};

// What it takes to decode single rows of a matrix of which not everything is in memory.
struct RowAccess {
  uint64_t index_bytes;    // the first bytes of section 0 tell where the rows lie; every row needs them
  uint64_t row_bytes_max;  // upper bound of what one row needs besides,
  uint64_t ranges_max;     // and in how many ranges it lies at most
  // From here on section 0 holds what nearly every row needs a little of: worth keeping in memory if it is short.
  uint64_t details_offset = UINT64_MAX;
};

// Codecs are immutable: every function may be called from many threads at once.
class Codec {
 public:
  virtual ~Codec() = default;

  virtual std::string_view name() const = 0;
  virtual Capabilities capabilities() const = 0;
  virtual std::span<const SectionKind> section_kinds() const = 0;

  // Why encode, validate and decode_rows cannot work in this build; empty when they can.
  virtual std::string unavailable_reason() const { return {}; }

  // `weights`: BF16 patterns, row-major, rows * columns. Throws std::invalid_argument for a shape or parameters that
  // the codec cannot take.
  virtual EncodedMatrix encode(std::span<const uint16_t> weights, MatrixShape shape,
                               const EncodeParameters& parameters) const = 0;

  // Checks everything that can be checked without decoding; throws FormatError. Meant to run once per record.
  virtual void validate(const MatrixView& matrix) const = 0;

  // Decodes rows [row_begin, row_end) to out[row_end - row_begin][columns]. Never touches memory outside the sections
  // and the output, whatever the bytes are. Throws FormatError where the bytes cannot be decoded (validate() may be
  // needed to find damage that still decodes to something), std::invalid_argument for a bad row range.
  virtual void decode_rows(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out,
                           InstructionSet instruction_set) const = 0;

  // The unit of parallel decoding that contains `row`: decoding [begin, end) alone repeats no work of its neighbours.
  virtual RowRange split_at(const MatrixView& matrix, uint64_t row) const = 0;

  // How single rows of such a matrix can be decoded; nothing where that takes all of the sections.
  virtual std::optional<RowAccess> row_access(MatrixShape shape, std::span<const uint32_t> shard_bytes) const;

  // The bytes that decode_rows() needs for rows [row_begin, row_end), besides the index: what it writes does not depend
  // on any others, though it may touch them. Of the matrix itself, which was validated, only the index is looked at.
  // Ranges may be empty. Throws std::invalid_argument for a bad row range.
  virtual std::vector<SectionRange> row_ranges(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end) const;

 protected:
  Codec() = default;
  Codec(const Codec&) = default;
  Codec& operator=(const Codec&) = default;
};

// Throws std::invalid_argument unless `weights` is a matrix of the given non-empty shape.
void check_encode_arguments(std::span<const uint16_t> weights, MatrixShape shape);

// Throws std::invalid_argument unless row_begin <= row_end <= rows.
void check_row_range(MatrixShape shape, uint64_t row_begin, uint64_t row_end);

}  // namespace zipmoe
