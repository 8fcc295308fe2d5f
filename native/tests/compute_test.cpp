// Products on packed and raw weights agree on every instruction set and for every number of threads, and stay inside
// their buffers whatever the bytes are. Meant to run under the sanitizers: every buffer has exactly the promised
// length.
#undef NDEBUG
#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "codec/fx3.hpp"
#include "codec/fx3_layout.hpp"
#include "codec/registry.hpp"
#include "compute/expert_feed_forward.hpp"
#include "compute/gemv.hpp"
#include "compute/scratch_pool.hpp"
#include "simd/instruction_set.hpp"

namespace zipmoe {
namespace {

using Random = std::mt19937_64;
using Words = std::vector<uint16_t>;

Words gaussian(uint64_t count, uint64_t seed, float deviation) {
  Random random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  Words words(count);
  for (uint16_t& word : words) {
    const float value = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    word = static_cast<uint16_t>(bits >> 16);
  }
  return words;
}

// The product as bit patterns of fp32.
std::vector<uint32_t> product(const WeightMatrix& matrix, const Words& x, uint64_t tokens, uint32_t threads,
                              InstructionSet instruction_set) {
  const MatrixShape shape = matrix.shape();
  std::vector<float> sums(tokens * shape.rows);
  ComputeThreads pool(threads);
  const TokenInputs inputs({x.data(), shape.columns}, tokens, shape.columns, pool);
  gemv({.matrix = matrix}, inputs, {.float32 = sums.data(), .stride = shape.rows}, pool,
       simd::gemv_kernels(instruction_set));
  std::vector<uint32_t> bits(sums.size());
  std::memcpy(bits.data(), sums.data(), sums.size() * sizeof(float));
  return bits;
}

constexpr uint64_t kTokensMax = simd::kGemmTokensMax + 2;  // more than a task multiplies at once

void test_all_kernels_agree() {
  const MatrixShape shapes[] = {{1, 1}, {3, 65}, {5, 4097}, {130, 700}, {259, 192}, {6, 64 * 67 - 5}};
  for (const MatrixShape shape : shapes) {
    const Words weights = gaussian(shape.rows * shape.columns, shape.rows, 0.02f);
    const Words x = gaussian(kTokensMax * shape.columns, 7, 1.5f);
    const auto section = encode_fx3(weights, shape, Fx3RawFallback::never);
    const auto fallback = encode_fx3(weights, shape, Fx3RawFallback::when_smaller);
    for (const uint64_t tokens : {uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{4}, uint64_t{5}, uint64_t{6},
                                  uint64_t{7}, uint64_t{14}, simd::kUnpackedTokensMin, kTokensMax}) {
      const auto expected = product(WeightMatrix::bfloat16(weights, shape), x, tokens, 1, InstructionSet::scalar);
      for (const InstructionSet each : supported_instruction_sets()) {
        for (uint32_t threads = 1; threads <= 3; ++threads) {
          assert(product(WeightMatrix::fx3(section, shape), x, tokens, threads, each) == expected);
          assert(product(WeightMatrix::fx3(fallback, shape), x, tokens, threads, each) == expected);
          assert(product(WeightMatrix::bfloat16(weights, shape), x, tokens, threads, each) == expected);
        }
      }
    }
  }
}

void test_damaged_sections_are_safe() {
  constexpr MatrixShape shape{13, 4200};
  const Words x = gaussian(kTokensMax * shape.columns, 8, 1.0f);
  const auto intact = encode_fx3(gaussian(shape.rows * shape.columns, 9, 0.02f), shape, Fx3RawFallback::never);
  const Fx3Layout layout = Fx3Layout::of(shape);
  Random random(10);
  for (int round = 0; round < 6; ++round) {
    auto section = intact;
    for (uint64_t i = layout.index_offset; i < section.size(); ++i) {
      if (round == 0) {
        section[i] = 0xFF;
      } else if (random() % 8 == 0) {
        section[i] = static_cast<uint8_t>(random());
      }
    }
    for (const InstructionSet each : supported_instruction_sets()) {
      for (const uint64_t tokens : {uint64_t{2}, uint64_t{4}, uint64_t{8}, kTokensMax}) {
        assert(product(WeightMatrix::fx3(section, shape), x, tokens, 2, each).size() == tokens * shape.rows);
      }
    }
  }
}

void test_refused_matrices() {
  const auto section = encode_fx3(gaussian(8 * 100, 11, 0.02f), {8, 100}, Fx3RawFallback::never);
  const auto refused = [&](std::span<const uint8_t> bytes, MatrixShape shape) {
    try {
      (void)WeightMatrix::fx3(bytes, shape);
    } catch (const FormatError&) {
      return true;
    }
    return false;
  };
  assert(refused(section, {8, 99}));
  assert(refused(section, {9, 100}));
  assert(refused(std::span(section).first(section.size() - 1), {8, 100}));
  assert(refused({}, {8, 100}));
  assert(!refused(section, {8, 100}));
}

void test_experts() {
  constexpr uint64_t hidden = 200;
  ComputeThreads alone(1);
  ComputeThreads three(3);
  for (const GateLayout layout : {GateLayout::none, GateLayout::halves, GateLayout::interleaved}) {
    for (const uint64_t intermediate : {uint64_t{1}, uint64_t{90}, uint64_t{331}}) {
      const uint64_t rows = layout == GateLayout::none ? intermediate : 2 * intermediate;
      const Words first = gaussian(rows * hidden, 12, 0.05f);
      const Words down = gaussian(hidden * intermediate, 13, 0.05f);
      const Words bias = gaussian(rows, 14, 1.0f);
      const auto packed = encode_fx3(first, {rows, hidden}, Fx3RawFallback::never);
      constexpr uint64_t tokens = kTokensMax;
      const Words x = gaussian(tokens * hidden, 15, 1.0f);
      Words expected;
      for (const InstructionSet each : supported_instruction_sets()) {
        for (ComputeThreads* threads : {&alone, &three}) {
          Words out(tokens * hidden);
          const ExpertFeedForward expert{
              .first = {.matrix = WeightMatrix::fx3(packed, {rows, hidden}), .bias = bias.data()},
              .up = std::nullopt,
              .down = {.matrix = WeightMatrix::bfloat16(down, {hidden, intermediate})},
              .x = {x.data(), hidden},
              .tokens = tokens,
              .output = {.bfloat16 = out.data(), .stride = hidden},
          };
          const GatedActivation activation{.function = ActivationFunction::gelu, .layout = layout, .limit = 2.0f};
          compute_experts({&expert, 1}, activation, *threads, simd::gemv_kernels(each));
          if (expected.empty()) expected = out;
          assert(out == expected);
        }
      }
    }
  }
}

// Intermediate vectors of two panels, with a task whose rows belong to both: the same as step by step.
void test_an_expert_wider_than_a_panel() {
  constexpr uint64_t hidden = 64;
  constexpr uint64_t intermediate = 4200;
  constexpr MatrixShape first_shape{intermediate, hidden};
  constexpr MatrixShape down_shape{hidden, intermediate};
  const Words first = gaussian(intermediate * hidden, 21, 0.1f);
  const Words down = gaussian(hidden * intermediate, 22, 0.1f);
  const GatedActivation activation{.function = ActivationFunction::silu, .layout = GateLayout::none};
  ComputeThreads threads(2);
  for (const InstructionSet each : supported_instruction_sets()) {
    const simd::GemvKernels& kernels = simd::gemv_kernels(each);
    for (const uint64_t tokens : {uint64_t{3}, uint64_t{7}, kTokensMax}) {
      const Words x = gaussian(tokens * hidden, 23, 1.0f);
      std::vector<float> sums(tokens * intermediate);
      gemv({.matrix = WeightMatrix::bfloat16(first, first_shape)},
           TokenInputs({x.data(), hidden}, tokens, hidden, threads), {.float32 = sums.data(), .stride = intermediate},
           threads, kernels);
      Words activated(tokens * intermediate);
      activation.apply(sums.data(), sums.data(), sums.size(), activated.data(), kernels.gate);
      Words expected(tokens * hidden);
      gemv({.matrix = WeightMatrix::bfloat16(down, down_shape)},
           TokenInputs({activated.data(), intermediate}, tokens, intermediate, threads),
           {.bfloat16 = expected.data(), .stride = hidden}, threads, kernels);
      Words out(tokens * hidden);
      const ExpertFeedForward expert{
          .first = {.matrix = WeightMatrix::bfloat16(first, first_shape)},
          .up = std::nullopt,
          .down = {.matrix = WeightMatrix::bfloat16(down, down_shape)},
          .x = {x.data(), hidden},
          .tokens = tokens,
          .output = {.bfloat16 = out.data(), .stride = hidden},
      };
      compute_experts({&expert, 1}, activation, threads, kernels);
      assert(out == expected);
    }
  }
}

void test_threads_run_every_task_once() {
  for (const int spin : {0, 50}) {
    ComputeThreads threads(4, std::chrono::microseconds(spin));
    for (uint32_t step = 0; step < 400; ++step) {
      const uint32_t tasks = step % 23;
      auto runs = std::make_unique<std::atomic<uint32_t>[]>(tasks + 1);
      threads.run(tasks, [&](uint32_t task) { ++runs[task]; });
      for (uint32_t task = 0; task < tasks; ++task) assert(runs[task] == 1);
      if (step % 100 == 99) std::this_thread::yield();
    }
  }
}

// The first task ends only when all others have: who has it leaves the rest of his range to the others.
void test_free_threads_take_the_tasks_of_a_busy_one() {
  for (const uint32_t count : {2u, 3u}) {
    ComputeThreads threads(count);
    for (int round = 0; round < 50; ++round) {
      std::atomic<uint32_t> others = 0;
      threads.run(20, [&](uint32_t task) {
        if (task != 0) {
          ++others;
          return;
        }
        while (others != 19) std::this_thread::yield();
      });
      assert(others == 19);
    }
  }
}

void test_several_callers_take_turns() {
  ComputeThreads threads(3);
  std::atomic<uint64_t> sum = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int step = 0; step < 100; ++step) threads.run(5, [&](uint32_t task) { sum += task; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  assert(sum == 3 * 100 * (0 + 1 + 2 + 3 + 4));
}

void test_scratch_is_used_again() {
  ScratchPool pool;
  const uint16_t* small;
  const uint16_t* large;
  {
    ScratchPool::Lease first(pool, 1000);
    ScratchPool::Lease second(pool, 10);
    large = first.values();
    small = second.values();
    assert(reinterpret_cast<uintptr_t>(large) % 64 == 0 && reinterpret_cast<uintptr_t>(small) % 64 == 0);
    std::fill(first.values(), first.values() + 1000, uint16_t{7});
  }
  const ScratchPool::Lease moderate(pool, 900);
  assert(moderate.values() == large && moderate.values()[999] == 7);
  ScratchPool::Lease little(pool, 10);
  assert(little.values() == small);
  const ScratchPool::Lease moved(std::move(little));
  assert(moved.values() == small && pool.kept_bytes() == 0);
}

void test_scratch_is_bounded() {
  constexpr uint64_t half = ScratchPool::kKeptBytes / 2 / sizeof(uint16_t);
  ScratchPool pool;
  {
    const ScratchPool::Lease first(pool, half);
    const ScratchPool::Lease second(pool, half / 2);
    const ScratchPool::Lease third(pool, half);
  }
  assert(pool.kept_bytes() == ScratchPool::kKeptBytes / 4 * 3);  // the first one was given back last
  {
    const ScratchPool::Lease too_large(pool, 2 * half + 1);
  }  // in the place of a smaller one
  assert(pool.kept_bytes() == ScratchPool::kKeptBytes / 4);
  {
    const ScratchPool::Lease lent(pool, half / 2);
    {
      const ScratchPool::Lease other(pool, 10);
    }
    assert(pool.kept_bytes() == 64);
    pool.clear();
    assert(pool.kept_bytes() == 0);
  }
  assert(pool.kept_bytes() == ScratchPool::kKeptBytes / 4);
}

// Rows of any order, more than one task copies, next to columns that are no multiple of a block; panel by panel.
void test_inputs_are_padded_with_zeros() {
  constexpr uint64_t tokens = 301;
  constexpr uint64_t stride = 4200;
  const Words x = gaussian(tokens * stride, 3, 1.0f);
  std::vector<uint64_t> numbers(tokens);
  for (uint64_t i = 0; i < tokens; ++i) numbers[i] = (7 * i + 5) % tokens;
  for (const uint32_t count : {1u, 3u}) {
    ComputeThreads threads(count);
    for (const uint64_t columns : {1, 63, 64, 100, 160, 4096, 4097, 4200}) {
      const uint64_t panel_columns = Fx3Layout::of({1, columns}).panel_columns;
      const uint64_t panels = (columns + panel_columns - 1) / panel_columns;
      {
        ScratchPool::Lease dirt(threads.scratch(), tokens * (stride + 128));
        std::fill(dirt.values(), dirt.values() + tokens * (stride + 128), uint16_t{0x7FC0});
      }
      TokenInputs inputs({x.data(), stride, numbers}, tokens, columns, threads);
      for (uint64_t token = 0; token < tokens; ++token) {
        for (uint64_t panel = 0; panel < panels; ++panel) {
          const uint64_t first = panel * panel_columns;
          const simd::GemvInputs from = inputs.from(panel, token, token + 1);
          assert(from.x == inputs.from(0, token, token + 1).x + panel * from.panel_step);
          assert(from.x == inputs.piece(token, first).data() && reinterpret_cast<uintptr_t>(from.x) % 64 == 0);
          assert(inputs.piece(token, first).size() == std::min(panel_columns, columns - first));
          for (uint64_t i = 0; i < (std::min(panel_columns, columns - first) + 63) / 64 * 64; ++i) {
            assert(from.x[i] == (first + i < columns ? x[numbers[token] * stride + first + i] : 0));
          }
        }
      }
    }
  }
}

void test_a_failing_task_is_reported() {
  ComputeThreads threads(2);
  for (int round = 0; round < 20; ++round) {
    std::atomic<uint32_t> runs = 0;
    std::string message;
    try {
      threads.run(8, [&](uint32_t task) {
        ++runs;
        if (task == 3) throw std::invalid_argument("task three");
      });
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    assert(message == "task three" && runs == 8);
    threads.run(4, [&](uint32_t) { ++runs; });
    assert(runs == 12);
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_all_kernels_agree();
  zipmoe::test_damaged_sections_are_safe();
  zipmoe::test_refused_matrices();
  zipmoe::test_experts();
  zipmoe::test_an_expert_wider_than_a_panel();
  zipmoe::test_threads_run_every_task_once();
  zipmoe::test_free_threads_take_the_tasks_of_a_busy_one();
  zipmoe::test_several_callers_take_turns();
  zipmoe::test_scratch_is_used_again();
  zipmoe::test_scratch_is_bounded();
  zipmoe::test_inputs_are_padded_with_zeros();
  zipmoe::test_a_failing_task_is_reported();
  std::puts("compute_test: all passed");
}
