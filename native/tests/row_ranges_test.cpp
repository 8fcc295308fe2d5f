// Which bytes of a section a codec needs for single rows: decoding must not depend on any others.
#include <algorithm>
#include <random>

#include "codec/fx3.hpp"
#include "codec/registry.hpp"
#include "tests/packed_model.hpp"

namespace zipmoe {
namespace {

struct Sample {
  MatrixShape shape;
  EncodedMatrix encoded;
  std::vector<uint16_t> weights;
};

// Exponents near one with outliers, or (raw) of every value.
std::vector<uint16_t> random_weights(MatrixShape shape, bool raw) {
  std::mt19937 generator(static_cast<uint32_t>(shape.rows * 31 + shape.columns));
  std::vector<uint16_t> weights(shape.rows * shape.columns);
  for (uint16_t& weight : weights) {
    weight = static_cast<uint16_t>(generator());
    if (!raw && generator() % 16 != 0) weight = static_cast<uint16_t>((weight & 0x80ff) | (0x3c00 + (weight & 0x100)));
  }
  return weights;
}

MatrixView view_of(const Sample& sample, std::vector<std::vector<uint8_t>>& sections) {
  MatrixView view{.shape = sample.shape, .sections = {}, .shard_bytes = sample.encoded.shard_bytes};
  for (size_t i = 0; i < sections.size(); ++i) view.sections[i] = {sections[i].data(), sections[i].size() - 64};
  return view;
}

// Decodes rows with every byte outside of the index and the ranges destroyed.
void check_rows(const Codec& codec, const Sample& sample, uint64_t row_begin, uint64_t row_end) {
  std::vector<std::vector<uint8_t>> whole;
  std::vector<std::vector<uint8_t>> kept;
  for (const EncodedSection& section : sample.encoded.sections) {
    whole.push_back(section.bytes);
    whole.back().resize(section.bytes.size() + 64);
    kept.emplace_back(whole.back().size(), uint8_t{0x5a});
  }
  const auto access = codec.row_access(sample.shape, sample.encoded.shard_bytes);
  CHECK(access.has_value());
  const uint64_t index_bytes = std::min<uint64_t>(access->index_bytes, whole[0].size());
  std::copy_n(whole[0].begin(), index_bytes, kept[0].begin());
  const std::vector<SectionRange> ranges = codec.row_ranges(view_of(sample, kept), row_begin, row_end);
  CHECK(row_end == row_begin || !ranges.empty());
  CHECK(ranges.size() <= access->ranges_max);
  uint64_t bytes = 0;
  for (const auto& [section, begin, end] : ranges) {
    CHECK(begin <= end && end <= sample.encoded.sections[section].bytes.size());
    std::copy(whole[section].begin() + static_cast<ptrdiff_t>(begin),
              whole[section].begin() + static_cast<ptrdiff_t>(end),
              kept[section].begin() + static_cast<ptrdiff_t>(begin));
    bytes += end - begin;
  }
  if (row_end - row_begin == 1) CHECK(bytes <= access->row_bytes_max);
  const uint64_t columns = sample.shape.columns;
  for (const InstructionSet instruction_set : supported_instruction_sets()) {
    std::vector<uint16_t> decoded((row_end - row_begin) * columns);
    codec.decode_rows(view_of(sample, kept), row_begin, row_end, decoded.data(), instruction_set);
    CHECK(std::equal(decoded.begin(), decoded.end(),
                     sample.weights.begin() + static_cast<ptrdiff_t>(row_begin * columns)));
  }
}

void check_samples(const Codec& codec, uint32_t shards) {
  // Odd sizes, several panels (more than 4096 columns), panels of one block (67 * 64 columns).
  for (const MatrixShape shape : {MatrixShape{1, 1}, {3, 65}, {37, 200}, {64, 64}, {13, 4160}, {9, 4288}, {18, 9000}}) {
    for (const bool raw : {false, true}) {
      Sample sample{shape, {}, random_weights(shape, raw)};
      sample.encoded = codec.encode(sample.weights, shape, {.level = 3, .huffman_only = false, .shards = shards});
      for (const uint64_t row : {uint64_t{0}, shape.rows / 3, shape.rows / 2, shape.rows - 1}) {
        check_rows(codec, sample, row, row + 1);
        check_rows(codec, sample, row / 2, row + 1);
      }
      check_rows(codec, sample, 0, 0);
      check_rows(codec, sample, 0, shape.rows);
      std::vector<std::vector<uint8_t>> sections;
      for (const EncodedSection& section : sample.encoded.sections) {
        sections.push_back(section.bytes);
        sections.back().resize(section.bytes.size() + 64);
      }
      EXPECT_ERROR(std::invalid_argument, codec.row_ranges(view_of(sample, sections), 0, shape.rows + 1));
    }
  }
}

void test_decoding_depends_on_the_index_and_the_ranges_only() {
  for (const std::string& name : codecs_to_test()) {
    for (const uint32_t shards : {1U, 3U, 40U}) {
      if (name != "fx3" || shards == 1) check_samples(find_codec(name), shards);
    }
  }
}

// FX3: one row of a large matrix is its group in each panel, not the matrix.
void test_a_row_needs_little() {
  const MatrixShape shape{2000, 4160};
  const std::vector<uint16_t> weights = random_weights(shape, false);
  const Fx3Codec codec;
  Sample sample{shape, codec.encode(weights, shape, {.level = 0, .huffman_only = false, .shards = 1}), weights};
  std::vector<std::vector<uint8_t>> sections = {sample.encoded.sections[0].bytes};
  sections[0].resize(sections[0].size() + 64);
  uint64_t bytes = 0;
  for (const SectionRange& range : codec.row_ranges(view_of(sample, sections), 1001, 1002))
    bytes += range.end - range.begin;
  CHECK(bytes > 4 * 4160 * 11 / 8 && bytes < 4 * 4160 * 13 / 8);
}

// A codec that does not say where its rows lie gets everything.
class PlainCodec final : public Codec {
 public:
  std::string_view name() const override { return "plain"; }
  Capabilities capabilities() const override { return {.separable = false, .fused = false}; }
  std::span<const SectionKind> section_kinds() const override { return kKinds; }
  EncodedMatrix encode(std::span<const uint16_t>, MatrixShape, const EncodeParameters&) const override { return {}; }
  void validate(const MatrixView&) const override {}
  void decode_rows(const MatrixView&, uint64_t, uint64_t, uint16_t*, InstructionSet) const override {}
  RowRange split_at(const MatrixView&, uint64_t row) const override { return {row, row + 1}; }

 private:
  static constexpr std::array kKinds = {SectionKind::packed};
};

void test_the_default_is_the_whole_section() {
  const PlainCodec codec;
  const std::vector<uint8_t> bytes(300);
  const MatrixView view{.shape = {10, 10}, .sections = {bytes}, .shard_bytes = {}};
  CHECK(!codec.row_access(view.shape, {}).has_value());
  const std::vector<SectionRange> ranges = codec.row_ranges(view, 4, 5);
  CHECK(ranges.size() == 1 && ranges[0].section == 0 && ranges[0].begin == 0 && ranges[0].end == 300);
  CHECK(codec.row_ranges(view, 4, 4).empty());
  EXPECT_ERROR(std::invalid_argument, codec.row_ranges(view, 4, 11));
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_decoding_depends_on_the_index_and_the_ranges_only();
  zipmoe::test_a_row_needs_little();
  zipmoe::test_the_default_is_the_whole_section();
  std::puts("row_ranges_test: ok");
  return 0;
}
