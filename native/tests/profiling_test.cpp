// The profiler's timed primitives without Python. Runs under the address, undefined and thread sanitizers.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "codec/bfloat16_fields.hpp"
#include "codec/registry.hpp"
#include "profiling/page_cache.hpp"
#include "profiling/timed_decoder.hpp"
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
  zipmoe::test_work_on_some_workers();
  std::puts("profiling_test: all passed");
  return 0;
}
