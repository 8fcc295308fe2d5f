// Tests of the executor share a small packed file with known weights.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "codec/checksum.hpp"
#include "codec/registry.hpp"
#include "runtime/engine.hpp"
#include "tests/engine_test_support.hpp"

namespace zipmoe {

inline constexpr MatrixShape kShapes[] = {{24, 64}, {64, 12}};

// A packed file of experts with two matrices each, and one dense matrix in two blocks.
class PackedModel {
 public:
  PackedModel(const std::string& codec, uint32_t experts, uint32_t shards, MatrixShape dense_block = {100, 32})
      : codec_(find_codec(codec)), shards_(shards) {
    std::vector<uint8_t> file(4096, 0);
    for (uint32_t expert = 0; expert < experts; ++expert) {
      add(file, "expert " + std::to_string(expert), {kShapes[0], kShapes[1]});
    }
    for (int block = 0; block < 2; ++block) add(file, "dense block " + std::to_string(block), {dense_block});
    write_file(path(), file);
    experts_ = experts;
  }

  RecordTable table() const {
    RecordTable result(codec_.name());
    result.add_file(path());
    for (const Record& record : records_) result.add_record(record);
    return result;
  }

  EngineOptions options(uint32_t slots, uint32_t threads = 2) const {
    EngineOptions result;
    result.decode_threads = threads;
    result.instruction_set = best_instruction_set();
    result.reader.threads.threads = 3;
    result.reader.threads.chunk_bytes = 4096;
    result.reader.uring.queue_depth = 3;
    result.reader.uring.block_bytes = 4096;
    uint64_t slot_bytes = 0;
    for (uint32_t i = 0; i < experts_; ++i) slot_bytes = std::max(slot_bytes, records_[i].length);
    result.size_classes = {{.slot_bytes = slot_bytes, .slot_limit = experts_, .slots = slots}};
    result.class_of_record.assign(experts_, 0);
    result.class_of_record.resize(experts_ + 2, ExpertCache::kNotCached);
    result.scratch_bytes = {64 * 64 * 2, 64 * 64 * 2};
    return result;
  }

  // The same with pools: all experts in one group, with staging for this many, and, if the codec is separable, with
  // buffers for the exponents of this many.
  EngineOptions pool_options(const PoolSlots& slots, uint32_t staging, uint32_t threads = 2,
                             uint32_t exponent_buffers = 0) const {
    EngineOptions result = options(1, threads);
    result.size_classes.clear();
    result.pools.emplace();
    PoolClass shape{.full_bytes = 0, .part_bytes = {}, .staging = staging};
    PoolGroup group{.pool_class = 0, .experts = {}, .slots = slots};
    const RecordTable records = table();
    if (codec_.capabilities().separable) shape.exponent_buffers = exponent_buffers;
    for (uint32_t expert = 0; expert < experts_; ++expert) {
      group.experts.push_back(expert);
      shape.full_bytes = std::max(shape.full_bytes, round_up(records.decoded_bytes(expert), 4096));
      shape.exponent_bytes = std::max(shape.exponent_bytes, round_up(records.exponent_bytes(expert), 4096));
      for (uint32_t part = 0; part < records[expert].extents.size(); ++part) {
        shape.part_bytes[part] = std::max(shape.part_bytes[part], records.part(expert, part).length);
      }
    }
    result.pools->classes = {shape};
    result.pools->groups = {group};
    return result;
  }

  const std::vector<uint16_t>& weights(uint32_t record, uint32_t matrix) const { return weights_[record][matrix]; }
  const Record& record(uint32_t index) const { return records_[index]; }
  std::string path() const { return folder_.file("packed"); }

  void flip_byte(uint64_t offset) const {
    std::fstream stream(path(), std::ios::binary | std::ios::in | std::ios::out);
    stream.seekg(static_cast<std::streamoff>(offset));
    const int byte = stream.get();
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.put(static_cast<char>(byte ^ 0x10));
    CHECK(stream.good());
  }

 private:
  void add(std::vector<uint8_t>& file, const std::string& record_name, const std::vector<MatrixShape>& shapes) {
    Record record;
    record.name = record_name;
    record.offset = file.size();
    std::vector<EncodedMatrix> encoded;
    weights_.emplace_back();
    for (const MatrixShape shape : shapes) {
      std::vector<uint16_t> matrix(shape.rows * shape.columns);
      for (uint16_t& weight : matrix) {  // exponents near one, as in real weights, with a few outliers
        weight = static_cast<uint16_t>((generator_() & 0x80ff) | (0x3c00 + ((generator_() % 4) << 8)));
      }
      encoded.push_back(codec_.encode(matrix, shape, {.level = 3, .huffman_only = false, .shards = shards_}));
      record.matrices.push_back({shape, {}, encoded.back().shard_bytes});
      weights_.back().push_back(std::move(matrix));
    }
    for (size_t kind = 0; kind < codec_.section_kinds().size(); ++kind) {
      file.resize(round_up(file.size(), 4096));
      const uint64_t begin = file.size();
      for (size_t matrix = 0; matrix < shapes.size(); ++matrix) {
        file.resize(round_up(file.size(), 64));
        const std::vector<uint8_t>& bytes = encoded[matrix].sections[kind].bytes;
        record.matrices[matrix].sections.push_back({file.size() - record.offset, bytes.size()});
        file.insert(file.end(), bytes.begin(), bytes.end());
      }
      file.resize(round_up(file.size() + 64, 4096));
      record.extents.push_back(
          {begin - record.offset, file.size() - begin, xxh3_64({file.data() + begin, file.size() - begin})});
    }
    record.length = file.size() - record.offset;
    records_.push_back(record);
  }

  TemporaryFolder folder_;
  const Codec& codec_;
  uint32_t shards_;
  uint32_t experts_ = 0;
  std::mt19937 generator_{7};
  std::vector<Record> records_;
  std::vector<std::vector<std::vector<uint16_t>>> weights_;
};

inline std::vector<std::string> codecs_to_test() {
  std::vector<std::string> names;
  for (const Codec* codec : all_codecs()) {
    if (codec->unavailable_reason().empty()) names.emplace_back(codec->name());
  }
  return names;
}

inline void load_dense(Engine& engine) {
  while (!engine.load_dense(std::chrono::milliseconds(50)).finished()) {
  }
}

}  // namespace zipmoe
