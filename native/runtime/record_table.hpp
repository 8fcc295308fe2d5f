// Everything that the engine knows about a packed folder: files, records, their extents and matrices. Checked when it
// is built, so that nobody further down has to doubt an offset.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/eviction_policy.hpp"
#include "codec/codec.hpp"

namespace zipmoe {

// A part of a record that is verified alone; the offset is relative to the record.
struct Extent {
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t xxh3_64 = 0;
};

// Where one matrix lies inside one extent; the offset is relative to the record.
struct Section {
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct RecordMatrix {
  MatrixShape shape;
  std::vector<Section> sections;  // one per extent
  std::vector<uint32_t> shard_bytes;
};

struct Record {
  std::string name;
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  std::vector<Extent> extents;
  std::vector<RecordMatrix> matrices;
};

// Where the parts of a record begin in memory, in the order of its extents; a part that is not there has none.
using PartPlaces = std::array<const uint8_t*, 2>;

class RecordTable {
 public:
  // Throws UnknownCodec.
  explicit RecordTable(std::string_view codec_name);

  uint32_t add_file(std::string path);
  // Throws std::invalid_argument, naming the record, if its geometry contradicts itself.
  RecordIndex add_record(Record record);

  const Codec& codec() const { return *codec_; }
  uint32_t size() const { return static_cast<uint32_t>(records_.size()); }
  const Record& operator[](RecordIndex record) const { return records_.at(record); }
  const std::vector<std::string>& files() const { return files_; }

  // The codec's view of one matrix of a record whose bytes begin at `data`.
  MatrixView view(RecordIndex record, uint32_t matrix, const uint8_t* data) const;
  // The same for a record whose parts lie apart; sections of parts that are not there are empty.
  MatrixView view(RecordIndex record, uint32_t matrix, const PartPlaces& places) const;

  // A part is what is read alone: an extent with the bytes between it and the next one. Offset relative to the record.
  Section part(RecordIndex record, uint32_t extent) const;
  PartPlaces places(RecordIndex record, const uint8_t* data) const;

  // Decoded records: matrices one after the other, each at a multiple of 64 bytes.
  uint64_t decoded_offset(RecordIndex record, uint32_t matrix) const;
  uint64_t decoded_bytes(RecordIndex record) const;
  // The same for exponents that have been decompressed, one byte per weight.
  uint64_t exponent_offset(RecordIndex record, uint32_t matrix) const;
  uint64_t exponent_bytes(RecordIndex record) const;

 private:
  uint64_t matrices_end(RecordIndex record, uint32_t matrix, uint64_t bytes_per_weight) const;

  const Codec* codec_;
  std::vector<std::string> files_;
  std::vector<Record> records_;
};

}  // namespace zipmoe
