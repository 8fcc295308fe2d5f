// FX3 matrix-vector product with AVX-512: records are decoded in register (VBMI2) and multiplied there (BF16).
#if defined(__x86_64__)
#include "simd/fx3_record_avx512.hpp"

#include "simd/denormals_avx.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/gemv_sum_avx512.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kBlockBytes = kFx3GroupRows * kFx3RecordBytes;
// Hardware prefetchers stop at page borders. Of 2, 4, 8, 12, 16 and 32 blocks ahead this was best with two cores, and
// within 3 % of the best (16) with one: docs/results/fused_gemv.md.
constexpr uint64_t kPrefetchBytes = 12 * kBlockBytes;

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) __m512 multiply(__m512 sums, const Fx3Weights512& weights,
                                                                         __m512i first, __m512i second) {
  sums = _mm512_dpbf16_ps(sums, (__m512bh)weights.first, (__m512bh)first);
  return _mm512_dpbf16_ps(sums, (__m512bh)weights.second, (__m512bh)second);
}

// `tokens` is a constant of each caller.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_groups(const Fx3GemvRun& run,
                                                                              const uint64_t tokens) {
  const Fx3Constants512 constants = make_constants(run.exponents);
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint64_t stride = run.inputs.stride;
  const uint8_t* record = run.records;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t index;
    __builtin_memcpy(&index, run.index + sizeof index * group, sizeof index);
    const uint8_t* exception = run.exceptions + (index < run.exception_count ? index : run.exception_count);
    const uint16_t* x = run.inputs.x;
    __m512 sums[kGemvTokensMax][kFx3GroupRows];
#pragma GCC unroll 3
    for (uint64_t token = 0; token < tokens; ++token) {
#pragma GCC unroll 4
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) sums[token][row] = _mm512_setzero_ps();
    }
    for (uint64_t block = 0; block < run.blocks; ++block, x += kFx3BlockWeights, record += kBlockBytes) {
      // Near the end of the exceptions: stay inside whatever the records say.
      const bool guarded = (uint64_t)(exceptions_end - exception) < kFx3EscapesPerBlockMax;
#pragma GCC unroll 6
      for (uint64_t byte = 0; byte < kBlockBytes; byte += 64) __builtin_prefetch(record + kPrefetchBytes + byte, 0, 0);
#pragma GCC unroll 4
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
        const Fx3Weights512 weights = decode_record(constants, record + row * kFx3RecordBytes, exception);
        if (__builtin_expect(guarded, 0) && exception > exceptions_end) exception = exceptions_end;
#pragma GCC unroll 3
        for (uint64_t token = 0; token < tokens; ++token) {
          sums[token][row] = multiply(sums[token][row], weights, _mm512_load_si512(x + token * stride),
                                      _mm512_load_si512(x + token * stride + 32));
        }
      }
    }
#pragma GCC unroll 3
    for (uint64_t token = 0; token < tokens; ++token) {
      float* out = run.sums + token * run.sums_stride + group * kFx3GroupRows;
      const __m128 four = sum_of_lanes(sums[token][0], sums[token][1], sums[token][2], sums[token][3]);
      _mm_storeu_ps(out, run.add ? _mm_add_ps(_mm_loadu_ps(out), four) : four);
    }
  }
}

ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_one_token(const Fx3GemvRun& run) { multiply_groups(run, 1); }
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_two_tokens(const Fx3GemvRun& run) {
  multiply_groups(run, 2);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_three_tokens(const Fx3GemvRun& run) {
  multiply_groups(run, 3);
}

}  // namespace

ZIPMOE_AVX512_CODE void fx3_gemv_avx512(const Fx3GemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  if (run.inputs.tokens == 1) {
    multiply_one_token(run);
  } else if (run.inputs.tokens == 2) {
    multiply_two_tokens(run);
  } else {
    multiply_three_tokens(run);
  }
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
