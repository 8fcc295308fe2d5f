#include "codec/planar.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "codec/bfloat16_fields.hpp"
#include "simd/kernels.hpp"

namespace zipmoe {
namespace {

constexpr std::array kSectionKinds = {SectionKind::exponent, SectionKind::sign_mantissa};
constexpr uint64_t kRowsMax = uint64_t{1} << 32;
constexpr uint64_t kWeightsMax = uint64_t{1} << 48;

// Throws FormatError unless the sections have the lengths that the shape and the shard table ask for.
void check_lengths(const Codec& codec, const MatrixView& matrix) {
  const auto fail = [&](const std::string& what) { throw FormatError(std::string(codec.name()) + ": " + what); };
  const auto [rows, columns] = matrix.shape;
  if (rows == 0 || columns == 0 || rows >= kRowsMax || rows > kWeightsMax / columns) fail("impossible shape");
  if (matrix.shard_bytes.empty()) fail("there are no shards");
  if (matrix.shard_bytes.size() >= kRowsMax) fail("too many shards");
  uint64_t total = 0;
  for (uint32_t bytes : matrix.shard_bytes) total += bytes;
  if (total != matrix.sections[0].size()) {
    fail("the E section has " + std::to_string(matrix.sections[0].size()) + " bytes but its shards have " +
         std::to_string(total));
  }
  if (matrix.sections[1].size() != rows * columns) {
    fail("the SM section has " + std::to_string(matrix.sections[1].size()) + " bytes instead of " +
         std::to_string(rows * columns));
  }
}

// Calls visit(shard, rows, compressed bytes) for each shard, in order.
template <typename Visit>
void for_each_shard(const MatrixView& matrix, Visit visit) {
  uint64_t offset = 0;
  for (uint64_t shard = 0; shard < matrix.shard_bytes.size(); ++shard) {
    const uint32_t bytes = matrix.shard_bytes[shard];
    visit(shard, shard_rows(matrix.shape.rows, matrix.shard_bytes.size(), shard),
          matrix.sections[0].subspan(offset, bytes));
    offset += bytes;
  }
}

}  // namespace

RowRange shard_rows(uint64_t rows, uint64_t shards, uint64_t shard) {
  return {rows * shard / shards, rows * (shard + 1) / shards};
}

uint64_t shard_of_row(uint64_t rows, uint64_t shards, uint64_t row) {
  // The last shard s with rows * s / shards <= row, that is rows * s < (row + 1) * shards.
  return ((row + 1) * shards - 1) / rows;
}

std::span<const SectionKind> PlanarCodec::section_kinds() const { return kSectionKinds; }

EncodedMatrix PlanarCodec::encode(std::span<const uint16_t> weights, MatrixShape shape,
                                  const EncodeParameters& parameters) const {
  if (std::string reason = unavailable_reason(); !reason.empty()) throw UnknownCodec(reason);
  check_encode_arguments(weights, shape);
  if (shape.rows >= kRowsMax || shape.rows > kWeightsMax / shape.columns) {
    throw std::invalid_argument("the matrix is too large");
  }
  if (parameters.shards == 0) throw std::invalid_argument("the number of shards must be at least 1");

  std::vector<uint8_t> sign_mantissa(weights.size());
  std::vector<uint8_t> compressed;
  std::vector<uint32_t> shard_bytes;
  // One shard after the other through two small buffers, because the plane of a whole embedding is large.
  std::vector<uint8_t> exponent;
  std::unique_ptr<uint8_t[]> shard_out;
  uint64_t shard_out_bytes = 0;
  for (uint64_t shard = 0; shard < parameters.shards; ++shard) {
    const RowRange rows = shard_rows(shape.rows, parameters.shards, shard);
    const uint64_t begin = rows.begin * shape.columns;
    const uint64_t count = (rows.end - rows.begin) * shape.columns;
    uint64_t bytes = 0;
    if (count > 0) {
      exponent.resize(count);
      split(weights.subspan(begin, count), exponent, std::span(sign_mantissa).subspan(begin, count));
      if (const uint64_t bound = compressed_bytes_max(count); bound > shard_out_bytes) {
        shard_out = std::make_unique_for_overwrite<uint8_t[]>(bound);
        shard_out_bytes = bound;
      }
      bytes = compress_shard(exponent, parameters, {shard_out.get(), shard_out_bytes});
      if (bytes > std::numeric_limits<uint32_t>::max()) {
        throw std::invalid_argument("a shard exceeds 4 GiB: use more shards");
      }
      compressed.insert(compressed.end(), shard_out.get(), shard_out.get() + bytes);
    }
    shard_bytes.push_back(static_cast<uint32_t>(bytes));
  }
  EncodedMatrix encoded;
  encoded.sections.push_back({SectionKind::exponent, std::move(compressed)});
  encoded.sections.push_back({SectionKind::sign_mantissa, std::move(sign_mantissa)});
  encoded.shard_bytes = std::move(shard_bytes);
  return encoded;
}

void PlanarCodec::validate(const MatrixView& matrix) const {
  if (std::string reason = unavailable_reason(); !reason.empty()) throw UnknownCodec(reason);
  check_lengths(*this, matrix);
  for_each_shard(matrix, [&](uint64_t shard, RowRange rows, std::span<const uint8_t> compressed) {
    const uint64_t raw_bytes = (rows.end - rows.begin) * matrix.shape.columns;
    if ((raw_bytes == 0) != compressed.empty()) {
      throw FormatError(std::string(name()) + ": shard " + std::to_string(shard) + " of " + std::to_string(raw_bytes) +
                        " bytes has " + std::to_string(compressed.size()) + " compressed bytes");
    }
    if (raw_bytes > 0) validate_shard(compressed, raw_bytes);
  });
}

void PlanarCodec::decode_rows(const MatrixView& matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out,
                              InstructionSet instruction_set) const {
  if (std::string reason = unavailable_reason(); !reason.empty()) throw UnknownCodec(reason);
  check_row_range(matrix.shape, row_begin, row_end);
  check_lengths(*this, matrix);
  const uint64_t columns = matrix.shape.columns;
  const std::span<const uint8_t> sign_mantissa = matrix.sections[1];
  const simd::Recombine recombine_kernel = simd::kernels(instruction_set).recombine;
  for_each_shard(matrix, [&](uint64_t, RowRange rows, std::span<const uint8_t> compressed) {
    const RowRange wanted = {std::max(rows.begin, row_begin), std::min(rows.end, row_end)};
    if (wanted.begin >= wanted.end) return;
    const uint64_t shard_weights = (rows.end - rows.begin) * columns;
    const uint64_t wanted_weights = (wanted.end - wanted.begin) * columns;
    uint16_t* target = out + (wanted.begin - row_begin) * columns;
    std::unique_ptr<uint8_t[]> scratch;
    uint8_t* exponent = nullptr;
    if (wanted_weights == shard_weights) {
      // The exponents go to the upper half of where their weights will be: no scratch memory, one buffer in cache.
      exponent = reinterpret_cast<uint8_t*>(target) + shard_weights;
    } else {
      scratch = std::make_unique_for_overwrite<uint8_t[]>(shard_weights);
      exponent = scratch.get();
    }
    decompress_shard(compressed, {exponent, shard_weights});
    recombine_kernel(exponent + (wanted.begin - rows.begin) * columns, sign_mantissa.data() + wanted.begin * columns,
                     wanted_weights, target);
  });
}

void PlanarCodec::decompress_shard_of(const MatrixView& matrix, uint32_t shard, std::span<uint8_t> raw) const {
  if (std::string reason = unavailable_reason(); !reason.empty()) throw UnknownCodec(reason);
  uint64_t begin = 0;
  for (uint32_t i = 0; i < shard; ++i) begin += matrix.shard_bytes[i];
  const uint64_t bytes = matrix.shard_bytes[shard];
  if (begin + bytes > matrix.sections[0].size()) {
    throw FormatError(std::string(name()) + ": the shards exceed the E section");
  }
  if (!raw.empty()) decompress_shard(matrix.sections[0].subspan(begin, bytes), raw);
}

std::optional<RowAccess> PlanarCodec::row_access(MatrixShape shape, std::span<const uint32_t> shard_bytes) const {
  const uint32_t largest = shard_bytes.empty() ? 0 : *std::max_element(shard_bytes.begin(), shard_bytes.end());
  return RowAccess{.index_bytes = 0, .row_bytes_max = largest + shape.columns, .ranges_max = 2};
}

std::vector<SectionRange> PlanarCodec::row_ranges(const MatrixView& matrix, uint64_t row_begin,
                                                  uint64_t row_end) const {
  check_row_range(matrix.shape, row_begin, row_end);
  check_lengths(*this, matrix);
  std::vector<SectionRange> ranges;
  if (row_begin == row_end) return ranges;
  const uint64_t shards = matrix.shard_bytes.size();
  const auto bytes_before = [&](uint64_t shard) {
    return std::accumulate(matrix.shard_bytes.begin(), matrix.shard_bytes.begin() + static_cast<ptrdiff_t>(shard),
                           uint64_t{0});
  };
  ranges.push_back({0, bytes_before(shard_of_row(matrix.shape.rows, shards, row_begin)),
                    bytes_before(shard_of_row(matrix.shape.rows, shards, row_end - 1) + 1)});
  ranges.push_back({1, row_begin * matrix.shape.columns, row_end * matrix.shape.columns});
  return ranges;
}

RowRange PlanarCodec::split_at(const MatrixView& matrix, uint64_t row) const {
  check_row_range(matrix.shape, row, row + 1);
  const uint64_t shards = std::max<uint64_t>(matrix.shard_bytes.size(), 1);
  return shard_rows(matrix.shape.rows, shards, shard_of_row(matrix.shape.rows, shards, row));
}

}  // namespace zipmoe
