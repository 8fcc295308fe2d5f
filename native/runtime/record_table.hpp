// Everything that the engine knows about a packed folder: files, records, their extents and matrices. Checked when it
// is built, so that nobody further down has to doubt an offset.
#pragma once

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

 private:
  const Codec* codec_;
  std::vector<std::string> files_;
  std::vector<Record> records_;
};

}  // namespace zipmoe
