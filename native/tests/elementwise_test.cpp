// Sums and products of BF16 values against exact ones, rounded by looking for the nearest pattern.
#include "compute/elementwise.hpp"

#include <cmath>
#include <random>
#include <stdexcept>

#include "tests/engine_test_support.hpp"
#include "tests/gaussian_words.hpp"

namespace zipmoe {
namespace {

constexpr uint16_t kInfinity = 0x7F80;
constexpr uint16_t kSign = 0x8000;
constexpr uint16_t kNan = 0x7FC0;

// Of a finite pattern, and of the one behind the largest finite one.
double magnitude(uint32_t pattern) {
  const int exponent = static_cast<int>(pattern >> 7);
  const int mantissa = static_cast<int>(pattern & 0x7F);
  return exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
}

// The nearest pattern, of two the even one.
uint16_t nearest(double value) {
  if (std::isnan(value)) return kNan;
  const uint16_t sign = std::signbit(value) ? kSign : 0;
  const double wanted = std::abs(value);
  if (std::isinf(wanted)) return sign | kInfinity;
  uint32_t below = 0;  // the largest pattern that is not larger
  uint32_t above = kInfinity;
  while (above - below > 1) {
    const uint32_t middle = (below + above) / 2;
    (magnitude(middle) <= wanted ? below : above) = middle;
  }
  const double down = wanted - magnitude(below);
  const double up = magnitude(above) - wanted;
  const uint32_t chosen = down < up || (down == up && below % 2 == 0) ? below : above;
  return static_cast<uint16_t>(sign | chosen);
}

uint16_t sum(uint16_t a, uint16_t b) {
  uint16_t out = 0x1234;
  add({&a, 1}, {&b, 1}, &out);
  return out;
}

uint16_t product(uint16_t factor, uint16_t value) {
  scale(factor, {&value, 1});
  return value;
}

void test_sums_of_chosen_values() {
  CHECK(sum(0x3F80, 0x4000) == 0x4040);  // 1 + 2
  CHECK(sum(0x3F80, 0x3B80) == 0x3F80);  // 1 + half a step: a tie, to the even one below
  CHECK(sum(0x3F81, 0x3B80) == 0x3F82);  // the next value + half a step: the even one above
  CHECK(sum(0x3F80, 0x3B81) == 0x3F81);  // more than half a step
  CHECK(sum(0x3F80, 0x3B7F) == 0x3F80);  // less
  CHECK(sum(0xBF81, 0xBB80) == 0xBF82);  // with the other sign
  CHECK(sum(0x3FFF, 0x3C00) == 0x4000);  // carried into the exponent
  CHECK(sum(0x0001, 0x0001) == 0x0002);  // below the normal ones
  CHECK(sum(0x007F, 0x0001) == 0x0080);  // the least normal one
  CHECK(sum(0x3F80, 0xBF80) == 0x0000);  // 1 - 1
  CHECK(sum(0x8000, 0x8000) == 0x8000);  // zeros
  CHECK(sum(0x8000, 0x0000) == 0x0000);
  CHECK(sum(0x7F7F, 0x7F7F) == kInfinity);  // too large
  CHECK(sum(0x7F7F, 0x7B00) == kInfinity);  // a tie between the largest one and what is not there
  CHECK(sum(0x7F7F, 0x7AFF) == 0x7F7F);
  CHECK(sum(kInfinity, 0xFF7F) == kInfinity);
  CHECK(sum(kSign | kInfinity, 0x3F80) == (kSign | kInfinity));
}

void test_every_nan_is_the_same_one() {
  CHECK(sum(kInfinity, kSign | kInfinity) == kNan);
  CHECK(product(kInfinity, 0x0000) == kNan && product(0x8000, kInfinity) == kNan);
  for (const uint16_t nan : {0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF}) {
    for (const uint16_t other : {0x0000, 0x3F80, 0x7F80, 0xFF80, 0xFFFF}) {
      CHECK(sum(nan, other) == kNan && sum(other, nan) == kNan);
      CHECK(product(nan, other) == kNan && product(other, nan) == kNan);
    }
  }
}

void test_any_sums_are_the_nearest_values() {
  std::mt19937 random(3);
  constexpr size_t count = 50000;
  Words a(count);
  Words b(count);
  for (size_t i = 0; i < count; ++i) {
    a[i] = static_cast<uint16_t>(random());
    // Of a similar size, half of the time: sums of others are the larger one of them.
    b[i] = static_cast<uint16_t>(i % 2 == 0 ? random() : a[i] ^ (random() & 0x87FF));
  }
  Words out(count);
  add(a, b, out.data());
  for (size_t i = 0; i < count; ++i) {
    const double exact = static_cast<double>(bfloat16_to_float(a[i])) + static_cast<double>(bfloat16_to_float(b[i]));
    CHECK(out[i] == nearest(exact));
  }
}

void test_any_products_are_the_nearest_values() {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    const auto factor = static_cast<uint16_t>(random());
    Words values(101);
    for (uint16_t& value : values) value = static_cast<uint16_t>(random());
    const Words before = values;
    scale(factor, values);
    for (size_t i = 0; i < values.size(); ++i) {
      const double exact =
          static_cast<double>(bfloat16_to_float(factor)) * static_cast<double>(bfloat16_to_float(before[i]));
      // Below the normal values of fp32 a product is rounded to those of fp32 first, as everywhere.
      const bool tiny = exact != 0 && std::abs(exact) < 0x1p-126;
      CHECK(values[i] == nearest(tiny ? static_cast<double>(static_cast<float>(exact)) : exact));
    }
  }
  CHECK(product(0x3F00, 0x0001) == 0x0000 && product(0x3F00, 0x0003) == 0x0002);  // ties
  CHECK(product(0x3FC0, 0x3F81) == 0x3FC2 && product(0x3FC0, 0x3F83) == 0x3FC4);  // ties, up and down
  CHECK(product(0xBF80, 0x0000) == 0x8000);
}

// Rows of every length, the tails of vectors among them; the sanitizers see what is written behind.
void test_the_output_may_be_one_of_the_inputs() {
  for (uint64_t size = 0; size < 131; ++size) {
    const Words a = gaussian(size, 1);
    const Words b = gaussian(size, 2);
    Words expected;
    for (uint64_t i = 0; i < size; ++i) expected.push_back(sum(a[i], b[i]));
    Words out(size);
    add(a, b, out.data());
    CHECK(out == expected);
    Words first = a;
    add(first, b, first.data());
    CHECK(first == expected);
    Words second = b;
    add(a, second, second.data());
    CHECK(second == expected);
    Words both = a;
    add(both, both, both.data());
    Words doubled = a;
    scale(0x4000, doubled);
    CHECK(both == doubled);
  }
}

void test_rows_of_different_lengths_are_refused() {
  const Words a(8);
  const Words b(7);
  Words out(8, 0x1234);
  EXPECT_ERROR(std::invalid_argument, add(a, b, out.data()));
  EXPECT_ERROR(std::invalid_argument, add(b, a, out.data()));
  EXPECT_ERROR(std::invalid_argument, add(a, {}, out.data()));
  CHECK(out == Words(8, 0x1234));
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_sums_of_chosen_values();
  zipmoe::test_every_nan_is_the_same_one();
  zipmoe::test_any_sums_are_the_nearest_values();
  zipmoe::test_any_products_are_the_nearest_values();
  zipmoe::test_the_output_may_be_one_of_the_inputs();
  zipmoe::test_rows_of_different_lengths_are_refused();
  std::puts("elementwise_test: ok");
  return 0;
}
