// The profiler's timed primitives without Python. Runs under the address, undefined and thread sanitizers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "codec/bfloat16_fields.hpp"
#include "codec/registry.hpp"
#include "io/reader_choice.hpp"
#include "profiling/page_cache.hpp"
#include "profiling/timed_decoder.hpp"
#include "profiling/timed_reader.hpp"
#include "profiling/timed_reads.hpp"
#include "profiling/timed_work.hpp"
#include "tests/engine_test_support.hpp"

namespace zipmoe {
namespace {

constexpr uint64_t kPageBytes = 4096;

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};

class AlignedBytes {
 public:
  explicit AlignedBytes(uint64_t bytes)
      : data_(static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, bytes))), bytes_(bytes) {
    std::memset(data_.get(), 0, bytes);
  }
  std::span<uint8_t> span() { return {data_.get(), bytes_}; }

 private:
  std::unique_ptr<uint8_t, Free> data_;
  uint64_t bytes_;
};

std::vector<uint16_t> random_weights(uint64_t count) {
  std::mt19937 generator(7);
  std::normal_distribution<float> values(0.0F, 0.02F);
  std::vector<uint16_t> weights(count);
  for (uint16_t& weight : weights) {
    const float value = values(generator);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    weight = static_cast<uint16_t>(bits >> 16);
  }
  return weights;
}

void test_reads_at_every_depth() {
  TemporaryFolder folder;
  std::vector<uint8_t> bytes(32 * kPageBytes);
  for (uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i / kPageBytes + 1);
  write_file(folder.file("a"), bytes);
  for (IoMode mode : {IoMode::automatic, IoMode::buffered}) {
    for (uint32_t depth : {1U, 4U, 8U}) {
      TimedReads reads({folder.file("a")}, mode, depth);
      AlignedBytes memory(depth * 2 * kPageBytes);
      std::vector<BlockPlace> places;
      for (uint64_t block = 0; block < 16; ++block) places.push_back({0, block * 2 * kPageBytes});
      const TimedReadResult result = reads.read(places, 2 * kPageBytes, memory.span());
      CHECK(result.bytes == bytes.size());
      CHECK(result.error_number == 0);
      CHECK(result.seconds > 0);
      CHECK(memory.span()[0] % 2 == 1 || memory.span()[0] == 0);  // each block begins with an odd page, or was not used
    }
  }
  drop_cached_pages(folder.file("a"), {{0, bytes.size()}, {kPageBytes, 1}});
  CHECK(cached_bytes(folder.file("a"), 0, bytes.size()) <= bytes.size());
}

// Memory that is written again and again stays in caches, which no engine's reads find there.
void test_every_read_goes_to_the_next_place() {
  constexpr uint64_t kPages = 64;
  TemporaryFolder folder;
  std::vector<uint8_t> bytes(kPages * kPageBytes);
  for (uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i / kPageBytes + 1);
  write_file(folder.file("a"), bytes);
  const auto pages_from = [](uint64_t first, uint64_t count) {
    std::vector<BlockPlace> places;
    for (uint64_t page = first; page < first + count; ++page) places.push_back({0, page * kPageBytes});
    return places;
  };
  AlignedBytes memory(10 * kPageBytes);
  const auto at = [&](uint64_t page) { return memory.span()[page * kPageBytes + 5]; };
  {
    TimedReads reads({folder.file("a")}, IoMode::automatic, 1);
    CHECK(reads.read(pages_from(0, 3), kPageBytes, memory.span()).bytes == 3 * kPageBytes);
    CHECK(at(0) == 1 && at(1) == 2 && at(2) == 3 && at(3) == 0);
    reads.read(pages_from(20, 1), kPageBytes, memory.span());  // one at a time, as latencies are measured
    reads.read(pages_from(30, 1), kPageBytes, memory.span());
    CHECK(at(2) == 3 && at(3) == 21 && at(4) == 31 && at(5) == 0);
    reads.read(pages_from(40, 7), kPageBytes, memory.span());  // around the end
    CHECK(at(5) == 41 && at(9) == 45 && at(0) == 46 && at(1) == 47 && at(2) == 3);
    reads.read(pages_from(50, 2), 3 * kPageBytes, memory.span());  // three longer places, and on from the first page
    CHECK(at(0) == 51 && at(2) == 53 && at(3) == 52 && at(5) == 54 && at(6) == 42);
    reads.read(pages_from(10, 2), 3 * kPageBytes, memory.span());
    CHECK(at(6) == 11 && at(8) == 13 && at(9) == 45 && at(0) == 12);
  }
  std::memset(memory.span().data(), 0, memory.span().size());
  TimedReads reads({folder.file("a")}, IoMode::automatic, 4);
  reads.read(pages_from(0, 4), kPageBytes, memory.span());
  std::vector<uint8_t> found;
  for (uint64_t page = 0; page < 10; ++page) found.push_back(at(page));
  std::sort(found.begin(), found.begin() + 4);  // whoever comes first
  CHECK(found == std::vector<uint8_t>({1, 2, 3, 4, 0, 0, 0, 0, 0, 0}));
  CHECK(reads.read(pages_from(0, 64), kPageBytes, memory.span()).bytes == 64 * kPageBytes);
  for (uint64_t page = 0; page < 10; ++page) CHECK(at(page) > 0);
  CHECK(reads.read(pages_from(0, 40), 2 * kPageBytes, memory.span().first(8 * kPageBytes)).bytes == 80 * kPageBytes);
}

void test_records_are_read_from_place_to_place() {
  TemporaryFolder folder;
  std::vector<uint8_t> bytes(64 * kPageBytes);
  for (uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i / kPageBytes + 1);
  write_file(folder.file("a"), bytes);
  for (const bool checksums : {false, true}) {
    TimedReader reader(open_reader({folder.file("a")}, {}).reader);
    AlignedBytes memory(7 * kPageBytes);
    const auto at = [&](uint64_t page) { return memory.span()[page * kPageBytes + 5]; };
    for (uint64_t first : {0, 10, 20, 30}) {
      const std::vector<BlockPlace> place = {{0, first * kPageBytes}};
      const TimedReadResult result = reader.read(place, 2 * kPageBytes, memory.span(), checksums);
      CHECK(result.bytes == 2 * kPageBytes && result.error_number == 0);
    }
    CHECK(at(0) == 31 && at(1) == 32 && at(2) == 11 && at(3) == 12 && at(4) == 21 && at(5) == 22 && at(6) == 0);
    std::vector<BlockPlace> places;
    for (uint64_t i = 0; i < 20; ++i) places.push_back({0, 3 * i * kPageBytes});
    CHECK(reader.read(places, 2 * kPageBytes, memory.span(), checksums).bytes == 40 * kPageBytes);
    const std::vector<BlockPlace> last = {{0, 63 * kPageBytes}};  // the file ends in it
    CHECK(reader.read(last, 2 * kPageBytes, memory.span(), checksums).bytes == kPageBytes);
  }
}

// Which workers get a unit is a matter of luck, so results may lie in any worker's part of the scratch memory.
bool some_part_holds(std::span<const uint8_t> scratch, uint32_t workers, const void* expected, uint64_t bytes) {
  const uint64_t part = scratch.size() / workers / 64 * 64;
  for (uint32_t slot = 0; slot < workers; ++slot) {
    if (std::memcmp(scratch.data() + slot * part, expected, bytes) == 0) return true;
  }
  return false;
}

void test_work_on_some_workers() {
  constexpr uint64_t kRows = 64;
  constexpr uint64_t kColumns = 256;
  const std::vector<uint16_t> weights = random_weights(kRows * kColumns);
  std::vector<uint8_t> exponent(weights.size());
  std::vector<uint8_t> sign_mantissa(weights.size());
  split(weights, exponent, sign_mantissa);
  const std::vector<Planes> planes(3, Planes{exponent, sign_mantissa});
  for (uint32_t workers : {1U, 3U}) {
    TimedWork work(workers);
    AlignedBytes scratch(workers * 2 * weights.size());
    CHECK(work.recombine(planes, 20, scratch.span(), best_instruction_set()) > 0);
    CHECK(some_part_holds(scratch.span(), workers, weights.data(), 2 * weights.size()));
    AlignedBytes source(uint64_t{4} << 20);
    AlignedBytes target(uint64_t{4} << 20);
    std::memset(source.span().data(), 5, source.span().size());
    CHECK(work.read_memory(source.span(), 9) > 0);
    CHECK(work.copy_memory(source.span(), target.span(), 4) > 0);
    CHECK(std::memcmp(source.span().data(), target.span().data(), source.span().size()) == 0);

    for (const Codec* codec : all_codecs()) {
      if (!codec->unavailable_reason().empty()) continue;
      const EncodeParameters parameters{.level = 3, .huffman_only = false, .shards = 1};
      const EncodedMatrix encoded = codec->encode(weights, {kRows, kColumns}, parameters);
      MatrixView view{.shape = {kRows, kColumns}, .sections = {}, .shard_bytes = encoded.shard_bytes};
      for (size_t i = 0; i < encoded.sections.size(); ++i) view.sections[i] = encoded.sections[i].bytes;
      std::vector<uint16_t> out(weights.size());
      TimedDecoder decoder(*codec, best_instruction_set(), workers);
      CHECK(decoder.decode(std::span(&view, 1), 3, out) > 0);
      CHECK(out == weights);
      const auto* planar = dynamic_cast<const PlanarCodec*>(codec);
      if (planar == nullptr) continue;
      const CompressedShard shard{view.sections[0], weights.size()};
      std::memset(scratch.span().data(), 0, scratch.span().size());
      CHECK(work.decompress(*planar, std::span(&shard, 1), 10, scratch.span()) > 0);
      CHECK(some_part_holds(scratch.span(), workers, exponent.data(), exponent.size()));
    }
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_reads_at_every_depth();
  zipmoe::test_every_read_goes_to_the_next_place();
  zipmoe::test_records_are_read_from_place_to_place();
  zipmoe::test_work_on_some_workers();
  std::puts("profiling_test: all passed");
  return 0;
}
