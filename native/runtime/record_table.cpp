#include "runtime/record_table.hpp"

#include <stdexcept>
#include <utility>

#include "codec/registry.hpp"
#include "io/reader.hpp"

namespace zipmoe {
namespace {

constexpr uint64_t kSectionAlignmentBytes = 64;
constexpr uint64_t kOffsetMax = INT64_MAX;  // of the operating system

bool contains(uint64_t outer_offset, uint64_t outer_length, uint64_t offset, uint64_t length) {
  return offset >= outer_offset && length <= outer_length && offset - outer_offset <= outer_length - length;
}

void require(bool condition, const std::string& record, const char* what) {
  if (!condition) throw std::invalid_argument("record " + record + ": " + what);
}

}  // namespace

RecordTable::RecordTable(std::string_view codec_name) : codec_(&find_codec(codec_name)) {}

uint32_t RecordTable::add_file(std::string path) {
  files_.push_back(std::move(path));
  return static_cast<uint32_t>(files_.size() - 1);
}

RecordIndex RecordTable::add_record(Record record) {
  const std::string& name = record.name;
  require(record.file < files_.size(), name, "its file is not in the table");
  require(record.offset % kReadAlignmentBytes == 0 && record.length % kReadAlignmentBytes == 0, name,
          "offset and length must be multiples of 4096");
  require(record.length > 0, name, "it is empty");
  require(record.offset <= kOffsetMax && record.length <= kOffsetMax - record.offset, name, "it ends beyond any file");
  require(record.extents.size() == codec_->section_kinds().size(), name, "it has not the extents of its codec");
  require(!record.matrices.empty(), name, "it has no matrix");
  uint64_t extents_end = 0;
  for (const Extent& extent : record.extents) {
    require(contains(0, record.length, extent.offset, extent.length), name, "an extent lies outside of it");
    require(extent.offset >= extents_end, name, "its extents overlap");
    extents_end = extent.offset + extent.length;
  }
  for (const RecordMatrix& matrix : record.matrices) {
    require(matrix.shape.rows > 0 && matrix.shape.columns > 0, name, "a matrix is empty");
    require(matrix.shape.rows <= UINT32_MAX && matrix.shape.columns <= UINT32_MAX, name, "a matrix is too large");
    require(matrix.sections.size() == record.extents.size(), name, "a matrix has not one section per extent");
    for (size_t i = 0; i < matrix.sections.size(); ++i) {
      const Section& section = matrix.sections[i];
      require(contains(record.extents[i].offset, record.extents[i].length, section.offset, section.length), name,
              "a section lies outside of its extent");
      require(section.offset % kSectionAlignmentBytes == 0, name, "a section is not aligned to 64 bytes");
    }
  }
  records_.push_back(std::move(record));
  return size() - 1;
}

MatrixView RecordTable::view(RecordIndex record, uint32_t matrix, const uint8_t* data) const {
  return view(record, matrix, places(record, data));
}

MatrixView RecordTable::view(RecordIndex record, uint32_t matrix, const PartPlaces& places) const {
  const Record& found = records_.at(record);
  const RecordMatrix& entry = found.matrices.at(matrix);
  MatrixView view;
  view.shape = entry.shape;
  for (size_t i = 0; i < entry.sections.size(); ++i) {
    if (places[i] == nullptr) continue;
    const Section& section = entry.sections[i];
    view.sections[i] = {places[i] + (section.offset - found.extents[i].offset), section.length};
  }
  view.shard_bytes = entry.shard_bytes;
  return view;
}

Section RecordTable::part(RecordIndex record, uint32_t extent) const {
  const Record& found = records_.at(record);
  const uint64_t begin = found.extents.at(extent).offset;
  const uint64_t end = extent + 1 < found.extents.size() ? found.extents[extent + 1].offset : found.length;
  return {begin, end - begin};
}

// End of the matrices before this one.
uint64_t RecordTable::matrices_end(RecordIndex record, uint32_t matrix, uint64_t bytes_per_weight) const {
  const std::vector<RecordMatrix>& matrices = records_.at(record).matrices;
  uint64_t offset = 0;
  for (uint32_t i = 0; i < matrix; ++i) {
    const MatrixShape shape = matrices.at(i).shape;
    const uint64_t bytes = shape.rows * shape.columns * bytes_per_weight;
    offset += (bytes + kSectionAlignmentBytes - 1) / kSectionAlignmentBytes * kSectionAlignmentBytes;
  }
  return offset;
}

uint64_t RecordTable::decoded_offset(RecordIndex record, uint32_t matrix) const {
  return matrices_end(record, matrix, sizeof(uint16_t));
}

uint64_t RecordTable::decoded_bytes(RecordIndex record) const {
  return decoded_offset(record, static_cast<uint32_t>(records_.at(record).matrices.size()));
}

uint64_t RecordTable::exponent_offset(RecordIndex record, uint32_t matrix) const {
  return matrices_end(record, matrix, 1);
}

uint64_t RecordTable::exponent_bytes(RecordIndex record) const {
  return exponent_offset(record, static_cast<uint32_t>(records_.at(record).matrices.size()));
}

PartPlaces RecordTable::places(RecordIndex record, const uint8_t* data) const {
  const Record& found = records_.at(record);
  PartPlaces places{};
  for (size_t i = 0; i < found.extents.size(); ++i) places[i] = data + found.extents[i].offset;
  return places;
}

}  // namespace zipmoe
