// Round trips through every codec on every instruction set of this machine, and decoding of damaged bytes. Meant to run
// under the address and undefined-behaviour sanitizers: every buffer has exactly the length that the interface
// promises.
#undef NDEBUG
#include <algorithm>
#include <array>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "codec/bfloat16_fields.hpp"
#include "codec/checksum.hpp"
#include "codec/fx3.hpp"
#include "codec/planar.hpp"
#include "codec/registry.hpp"

namespace zipmoe {
namespace {

using Random = std::mt19937_64;

uint64_t below(Random& random, uint64_t limit) { return random() % limit; }

struct Matrix {
  MatrixShape shape;
  std::vector<uint16_t> weights;
};

Matrix gaussian(MatrixShape shape, uint64_t seed) {
  Random random(seed);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  Matrix matrix{shape, std::vector<uint16_t>(shape.rows * shape.columns)};
  for (uint16_t& weight : matrix.weights) {
    const float value = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    weight = static_cast<uint16_t>(bits >> 16);
  }
  return matrix;
}

Matrix random_words(MatrixShape shape, uint64_t seed) {
  Random random(seed);
  Matrix matrix{shape, std::vector<uint16_t>(shape.rows * shape.columns)};
  for (uint16_t& weight : matrix.weights) weight = static_cast<uint16_t>(random());
  return matrix;
}

Matrix all_patterns() {
  Matrix matrix{{256, 256}, std::vector<uint16_t>(65536)};
  std::iota(matrix.weights.begin(), matrix.weights.end(), uint16_t{0});
  return matrix;
}

std::vector<Matrix> matrices() {
  std::vector<Matrix> all = {all_patterns(),         gaussian({1, 1}, 1),       gaussian({1, 777}, 2),
                             gaussian({333, 1}, 3),  gaussian({3, 65}, 4),      gaussian({130, 1000}, 5),
                             gaussian({9, 8256}, 6), random_words({37, 300}, 7)};
  for (uint16_t constant : {0x0000, 0x8000, 0x3c21, 0x7f80, 0xffff, 0x0001}) {
    all.push_back({{21, 260}, std::vector<uint16_t>(21 * 260, constant)});
  }
  return all;
}

// An encoded matrix that owns its bytes in allocations of exactly the right length.
struct Stored {
  const Codec* codec;
  MatrixShape shape;
  std::vector<std::vector<uint8_t>> sections;
  std::vector<uint32_t> shard_bytes;

  MatrixView view() const {
    MatrixView matrix{shape, {}, shard_bytes};
    for (size_t i = 0; i < sections.size(); ++i) matrix.sections[i] = sections[i];
    return matrix;
  }
};

Stored store(const Codec& codec, const Matrix& matrix, const EncodeParameters& parameters) {
  EncodedMatrix encoded = codec.encode(matrix.weights, matrix.shape, parameters);
  Stored stored{&codec, matrix.shape, {}, std::move(encoded.shard_bytes)};
  for (EncodedSection& section : encoded.sections) {
    section.bytes.shrink_to_fit();
    stored.sections.push_back(std::move(section.bytes));
  }
  return stored;
}

Stored store_fx3_codes(const Matrix& matrix) {
  Stored stored{&find_codec("fx3"), matrix.shape, {}, {}};
  stored.sections.push_back(encode_fx3(matrix.weights, matrix.shape, Fx3RawFallback::never));
  return stored;
}

std::vector<uint16_t> decode(const Stored& stored, uint64_t begin, uint64_t end, InstructionSet instruction_set) {
  std::vector<uint16_t> out((end - begin) * stored.shape.columns, 0xabcd);
  stored.codec->decode_rows(stored.view(), begin, end, out.data(), instruction_set);
  return out;
}

void check_round_trip(const Stored& stored, const Matrix& matrix, Random& random) {
  stored.codec->validate(stored.view());
  for (InstructionSet instruction_set : supported_instruction_sets()) {
    assert(decode(stored, 0, matrix.shape.rows, instruction_set) == matrix.weights);
    for (int i = 0; i < 8; ++i) {
      uint64_t begin = below(random, matrix.shape.rows + 1);
      uint64_t end = below(random, matrix.shape.rows + 1);
      if (begin > end) std::swap(begin, end);
      const auto expected_begin = matrix.weights.begin() + static_cast<ptrdiff_t>(begin * matrix.shape.columns);
      const auto expected_end = matrix.weights.begin() + static_cast<ptrdiff_t>(end * matrix.shape.columns);
      assert(decode(stored, begin, end, instruction_set) == std::vector<uint16_t>(expected_begin, expected_end));
    }
  }
  uint64_t covered = 0;
  while (covered < matrix.shape.rows) {
    const RowRange unit = stored.codec->split_at(stored.view(), covered);
    assert(unit.begin == covered && unit.end > covered && unit.end <= matrix.shape.rows);
    covered = unit.end;
  }
}

struct OperatingPoint {
  const char* codec;
  EncodeParameters parameters;
};

constexpr std::array kOperatingPoints = {
    OperatingPoint{"fx3", {0, false, 1}},   OperatingPoint{"zstd", {3, false, 4}},
    OperatingPoint{"zstd", {-7, false, 1}}, OperatingPoint{"zstd", {0, true, 3}},
    OperatingPoint{"lz4", {0, false, 5}},   OperatingPoint{"lz4hc", {9, false, 2}},
    OperatingPoint{"lz4", {0, false, 40}},
};

bool available(const char* codec) { return find_codec(codec).unavailable_reason().empty(); }

void test_round_trips() {
  Random random(11);
  for (const Matrix& matrix : matrices()) {
    check_round_trip(store_fx3_codes(matrix), matrix, random);
    for (const OperatingPoint& point : kOperatingPoints) {
      if (!available(point.codec)) continue;
      check_round_trip(store(find_codec(point.codec), matrix, point.parameters), matrix, random);
    }
  }
}

void test_fields() {
  const Matrix matrix = all_patterns();
  for (size_t count : {size_t{0}, size_t{1}, size_t{31}, size_t{32}, size_t{95}, size_t{1000}, size_t{65536}}) {
    const std::vector<uint16_t> weights(matrix.weights.begin(), matrix.weights.begin() + static_cast<ptrdiff_t>(count));
    std::vector<uint8_t> exponent(count);
    std::vector<uint8_t> sign_mantissa(count);
    split(weights, exponent, sign_mantissa);
    std::vector<uint8_t> alone(weights.size());
    keep_sign_mantissa(weights, alone);
    assert(alone == sign_mantissa);
    for (InstructionSet instruction_set : supported_instruction_sets()) {
      std::vector<uint16_t> out(count);
      recombine(exponent, sign_mantissa, out, instruction_set);
      assert(out == weights);
      // In place: the exponents in the upper half of the output.
      std::span<uint8_t> upper_half(reinterpret_cast<uint8_t*>(out.data()) + count, count);
      std::copy(exponent.begin(), exponent.end(), upper_half.begin());
      recombine(upper_half, sign_mantissa, out, instruction_set);
      assert(out == weights);
    }
  }
}

void test_shards() {
  for (uint64_t rows : {1u, 2u, 7u, 64u, 1408u}) {
    for (uint64_t shards : {1u, 2u, 3u, 8u, 100u}) {
      uint64_t covered = 0;
      for (uint64_t shard = 0; shard < shards; ++shard) {
        const RowRange held = shard_rows(rows, shards, shard);
        assert(held.begin == covered);
        covered = held.end;
        for (uint64_t row = held.begin; row < held.end; ++row) assert(shard_of_row(rows, shards, row) == shard);
      }
      assert(covered == rows);
    }
  }
}

void mutate(Stored& stored, Random& random) {
  // The first bytes (header, index, frame headers) more often than the rest.
  auto& section = stored.sections[below(random, stored.sections.size())];
  const uint64_t changes = 1 + below(random, 4);
  for (uint64_t i = 0; i < changes && !section.empty(); ++i) {
    const uint64_t limit = below(random, 4) == 0 ? section.size() : std::min<uint64_t>(section.size(), 160);
    uint8_t& byte = section[below(random, limit)];
    switch (below(random, 4)) {
      case 0:
        byte = static_cast<uint8_t>(byte ^ (1u << below(random, 8)));
        break;
      case 1:
        byte = 0;
        break;
      case 2:
        byte = 0xff;
        break;
      default:
        byte = static_cast<uint8_t>(random());
    }
  }
  switch (below(random, 8)) {
    case 0:
      section.resize(below(random, section.size() + 1));
      break;
    case 1:
      section.resize(section.size() + 1 + below(random, 130), static_cast<uint8_t>(random()));
      break;
    case 2:
      stored.shape.rows += below(random, 9) - 4;
      break;
    case 3:
      stored.shape.columns += below(random, 9) - 4;
      break;
    case 4:
      if (!stored.shard_bytes.empty()) {
        stored.shard_bytes[below(random, stored.shard_bytes.size())] = static_cast<uint32_t>(below(random, 3000));
      }
      break;
    case 5:
      if (stored.shard_bytes.size() > 1) {  // the sum stays right
        stored.shard_bytes[0] += 3;
        stored.shard_bytes[1] -= 3;
      }
      break;
    default:
      break;
  }
  section.shrink_to_fit();
}

struct FuzzCounts {
  uint64_t rejected = 0;
  uint64_t decoded = 0;
};

void fuzz(const Stored& original, uint64_t rounds, Random& random, FuzzCounts& counts) {
  for (uint64_t round = 0; round < rounds; ++round) {
    Stored damaged = original;
    mutate(damaged, random);
    bool valid = true;
    try {
      damaged.codec->validate(damaged.view());
    } catch (const FormatError&) {
      valid = false;
      ++counts.rejected;
    }
    // Decoding must stay inside its buffers whether validation was asked or not; it may refuse.
    const uint64_t rows = std::min<uint64_t>(damaged.shape.rows, 64);
    if (damaged.shape.columns > 100000) continue;  // a wrapped-around shape: the output could not be allocated
    const uint64_t begin = below(random, rows + 1);
    for (InstructionSet instruction_set : supported_instruction_sets()) {
      try {
        decode(damaged, begin, rows, instruction_set);
        if (valid) ++counts.decoded;
      } catch (const FormatError&) {
        // Only decompression may still find something.
        assert(!valid || damaged.codec->capabilities().separable);
      }
    }
  }
}

// Records and exceptions replaced by noise under an intact header and index: no kernel may leave its buffers.
void fuzz_fx3_contents(const Stored& original, uint64_t rounds, Random& random) {
  for (uint64_t round = 0; round < rounds; ++round) {
    Stored damaged = original;
    auto& blob = damaged.sections[0];
    const uint64_t begin = 64 + below(random, blob.size() - 64);
    const uint64_t end = begin + below(random, blob.size() - begin + 1);
    const bool only_escapes = below(random, 2) == 0;
    for (uint64_t i = begin; i < end; ++i) blob[i] = only_escapes ? 0xff : static_cast<uint8_t>(random());
    for (InstructionSet instruction_set : supported_instruction_sets()) {
      decode(damaged, 0, damaged.shape.rows, instruction_set);
    }
  }
}

void test_damage() {
  Random random(12);
  FuzzCounts counts;
  for (const Matrix& matrix : {gaussian({13, 200}, 1), gaussian({40, 640}, 2), random_words({6, 130}, 3)}) {
    const Stored codes = store_fx3_codes(matrix);
    fuzz(codes, 2000, random, counts);
    fuzz_fx3_contents(codes, 500, random);
    for (const OperatingPoint& point : kOperatingPoints) {
      if (available(point.codec)) {
        fuzz(store(find_codec(point.codec), matrix, point.parameters), 500, random, counts);
      }
    }
  }
  assert(counts.rejected > 1000 && counts.decoded > 100);
  std::printf("damage: %llu rejected by validation, %llu decodings of what passed it\n",
              static_cast<unsigned long long>(counts.rejected), static_cast<unsigned long long>(counts.decoded));
}

template <typename Error, typename Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void test_arguments() {
  const Codec& fx3 = find_codec("fx3");
  const Matrix matrix = gaussian({8, 64}, 1);
  assert(throws<UnknownCodec>([] { find_codec("zip"); }));
  assert(throws<std::invalid_argument>([&] { fx3.encode(matrix.weights, {8, 63}, {0, false, 1}); }));
  assert(throws<std::invalid_argument>([&] { fx3.encode(matrix.weights, {8, 64}, {0, false, 2}); }));
  assert(throws<std::invalid_argument>([&] { fx3.encode({}, {0, 64}, {0, false, 1}); }));
  const Stored stored = store(fx3, matrix, {0, false, 1});
  assert(throws<std::invalid_argument>([&] { decode(stored, 0, 9, InstructionSet::scalar); }));
  for (const char* name : {"zstd", "lz4hc"}) {
    if (!available(name)) continue;
    assert(throws<std::invalid_argument>([&] { store(find_codec(name), matrix, {23, false, 1}); }));
    assert(throws<std::invalid_argument>([&] { store(find_codec(name), matrix, {1, false, 0}); }));
  }
}

// Codecs are shared by all threads; each decodes the units that are its own, all into one output.
void test_threads() {
  const Matrix matrix = gaussian({257, 640}, 9);
  for (const OperatingPoint& point : kOperatingPoints) {
    if (!available(point.codec)) continue;
    const Stored stored = store(find_codec(point.codec), matrix, point.parameters);
    std::vector<uint16_t> out(matrix.weights.size());
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        uint64_t number = 0;
        for (uint64_t row = 0; row < matrix.shape.rows; ++number) {
          const RowRange unit = stored.codec->split_at(stored.view(), row);
          if (number % 4 == thread) {
            stored.codec->decode_rows(stored.view(), unit.begin, unit.end, &out[unit.begin * matrix.shape.columns],
                                      best_instruction_set());
          }
          row = unit.end;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    assert(out == matrix.weights);
  }
}

void test_checksum() {
  // Values of the reference implementation.
  assert(xxh3_64({}) == 0x2d06800538d394c2);
  const std::array<uint8_t, 3> abc = {'a', 'b', 'c'};
  assert(xxh3_64(abc) == 0x78af5f94892f3950);
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_checksum();
  zipmoe::test_shards();
  zipmoe::test_fields();
  zipmoe::test_arguments();
  zipmoe::test_round_trips();
  zipmoe::test_damage();
  zipmoe::test_threads();
  std::puts("codec_test: all passed");
}
