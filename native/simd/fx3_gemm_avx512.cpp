// FX3 matrix times more tokens than a matrix-vector product takes, with AVX-512. Up to six tokens are multiplied while
// a group of four rows is decoded in register. Where there are more, that is done with the first four, and what was
// decoded is kept in the first-level cache for the tiles of the others.
#if defined(__x86_64__)
#include "simd/fx3_record_avx512.hpp"

#include "simd/denormals_avx.hpp"
#include "simd/gemm_tile_avx512.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kBlockBytes = kFx3GroupRows * kFx3RecordBytes;
constexpr uint64_t kPrefetchBytes = 12 * kBlockBytes;  // as in fx3_gemv_avx512.cpp
// Multiplied in register where more are to follow; 3 and 6 were up to 8 % slower.
constexpr uint64_t kFirstTokens = 4;

// Multiplies one group with the first tokens while it is decoded in register, and stores what was decoded unless these
// are all. `tokens` and `store` are constants of each caller.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void decode_and_multiply(const Fx3GemvRun& run, uint64_t group,
                                                                                  uint16_t* decoded,
                                                                                  const uint64_t tokens,
                                                                                  const bool store) {
  const Fx3Constants512 constants = make_constants(run.exponents);
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  uint32_t index;
  __builtin_memcpy(&index, run.index + sizeof index * group, sizeof index);
  const uint8_t* exception = run.exceptions + (index < run.exception_count ? index : run.exception_count);
  const uint8_t* record = run.records + group * run.blocks * kBlockBytes;
  const uint16_t* x = run.inputs.x;
  const uint64_t stride = run.inputs.stride;
  __m512 sums[kTileTokensMax][kFx3GroupRows];
#pragma GCC unroll 6
  for (uint64_t token = 0; token < tokens; ++token) {
#pragma GCC unroll 4
    for (uint64_t row = 0; row < kFx3GroupRows; ++row) sums[token][row] = _mm512_setzero_ps();
  }
  for (uint64_t block = 0; block < run.blocks; ++block, record += kBlockBytes, x += kFx3BlockWeights) {
    // Near the end of the exceptions: stay inside whatever the records say.
    const bool guarded = (uint64_t)(exceptions_end - exception) < kFx3EscapesPerBlockMax;
#pragma GCC unroll 6
    for (uint64_t byte = 0; byte < kBlockBytes; byte += 64) __builtin_prefetch(record + kPrefetchBytes + byte);
#pragma GCC unroll 4
    for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
      const Fx3Weights512 weights = decode_record(constants, record + row * kFx3RecordBytes, exception);
      if (__builtin_expect(guarded, 0) && exception > exceptions_end) exception = exceptions_end;
      if (store) {
        _mm512_store_si512(decoded, weights.first);
        _mm512_store_si512(decoded + 32, weights.second);
        decoded += kFx3BlockWeights;
      }
#pragma GCC unroll 6
      for (uint64_t token = 0; token < tokens; ++token) {
        const uint16_t* input = x + token * stride;
        sums[token][row] =
            _mm512_dpbf16_ps(sums[token][row], (__m512bh)weights.first, (__m512bh)_mm512_load_si512(input));
        sums[token][row] =
            _mm512_dpbf16_ps(sums[token][row], (__m512bh)weights.second, (__m512bh)_mm512_load_si512(input + 32));
      }
    }
  }
  store_sums(sums, {run.sums + group * kFx3GroupRows, run.sums_stride, run.add}, tokens);
}

ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_four_tokens(const Fx3GemvRun& run) {
  for (uint64_t group = 0; group < run.groups; ++group) decode_and_multiply(run, group, nullptr, 4, false);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_five_tokens(const Fx3GemvRun& run) {
  for (uint64_t group = 0; group < run.groups; ++group) decode_and_multiply(run, group, nullptr, 5, false);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_six_tokens(const Fx3GemvRun& run) {
  for (uint64_t group = 0; group < run.groups; ++group) decode_and_multiply(run, group, nullptr, 6, false);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_first_tokens(const Fx3GemvRun& run, uint64_t group,
                                                                        uint16_t* weights) {
  decode_and_multiply(run, group, weights, kFirstTokens, true);
}

ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_many_tokens(const Fx3GemvRun& run) {
  alignas(64) uint16_t weights[kFx3GroupRows * kFx3PanelColumnsMax];
  const uint64_t group_bytes = run.blocks * kBlockBytes;
  GemvInputs others = run.inputs;
  others.x += kFirstTokens * others.stride;
  others.tokens -= kFirstTokens;
  float* const sums = run.sums + kFirstTokens * run.sums_stride;
  for (uint64_t group = 0; group < run.groups; ++group) {
    multiply_first_tokens(run, group, weights);
    const uint8_t* next = run.records + (group + 1) * group_bytes + kPrefetchBytes;
    const uint64_t next_bytes = group_bytes > kPrefetchBytes ? group_bytes - kPrefetchBytes : 0;
    multiply_all_tokens({weights, run.blocks}, others, {sums + group * kFx3GroupRows, run.sums_stride, run.add},
                        Upcoming(next, next_bytes, run.blocks * tile_count(others.tokens)));
  }
}

}  // namespace

ZIPMOE_AVX512_CODE void fx3_gemm_avx512(const Fx3GemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  switch (run.inputs.tokens) {
    case 4:
      multiply_four_tokens(run);
      break;
    case 5:
      multiply_five_tokens(run);
      break;
    case 6:
      multiply_six_tokens(run);
      break;
    default:
      multiply_many_tokens(run);
  }
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
