// Products with many tokens, with AVX-512: rows are unpacked to the second-level cache once, and a tile of inputs stays
// in the first while all of them go by.
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

// One block of a group's rows. `guarded` is a constant of each caller.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void unpack_block(const Fx3Constants512& constants,
                                                                           const uint8_t* record,
                                                                           const uint8_t*& exception,
                                                                           const uint8_t* exceptions_end,
                                                                           uint16_t* weights, const bool guarded) {
#pragma GCC unroll 4
  for (uint64_t row = 0; row < kFx3GroupRows; ++row, record += kFx3RecordBytes, weights += kFx3BlockWeights) {
    const Fx3Weights512 unpacked = decode_record(constants, record, exception);
    if (guarded && exception > exceptions_end) exception = exceptions_end;
    _mm512_store_si512(weights, unpacked.first);
    _mm512_store_si512(weights + 32, unpacked.second);
  }
}

}  // namespace

ZIPMOE_AVX512_CODE void fx3_unpack_avx512(const Fx3GemvRun& run, uint16_t* weights) {
  const Fx3Constants512 constants = make_constants(run.exponents);
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint8_t* record = run.records;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t index;
    __builtin_memcpy(&index, run.index + sizeof index * group, sizeof index);
    const uint8_t* exception = run.exceptions + (index < run.exception_count ? index : run.exception_count);
    for (uint64_t block = 0; block < run.blocks; ++block, record += kBlockBytes, weights += kFourRowsBlock) {
#pragma GCC unroll 6
      for (uint64_t byte = 0; byte < kBlockBytes; byte += 64) __builtin_prefetch(record + kPrefetchBytes + byte);
      // Near the end of the exceptions: stay inside whatever the records say.
      if (__builtin_expect((uint64_t)(exceptions_end - exception) < kFx3EscapesPerBlockMax, 0)) {
        unpack_block(constants, record, exception, exceptions_end, weights, true);
      } else {
        unpack_block(constants, record, exception, exceptions_end, weights, false);
      }
    }
  }
}

ZIPMOE_AVX512_CODE void unpacked_gemm_avx512(const UnpackedGemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  const uint64_t group_weights = run.blocks * kFourRowsBlock;
  Upcoming upcoming(run.upcoming, run.upcoming_bytes,
                    tile_count(run.inputs.tokens) * run.panels * run.groups * run.blocks);
  GemvInputs inputs = run.inputs;
  float* sums = run.sums;
  for (uint64_t number = tile_count(run.inputs.tokens), left = run.inputs.tokens; number > 0; --number) {
    inputs.tokens = (left + number - 1) / number;
    const uint16_t* weights = run.weights;
    for (uint64_t panel = 0; panel < run.panels; ++panel) {
      const TileInputs tile{inputs.x + panel * inputs.panel_step, inputs.stride};
      for (uint64_t group = 0; group < run.groups; ++group, weights += group_weights) {
        multiply_tokens({weights, run.blocks}, tile, {sums + group * kFx3GroupRows, run.sums_stride, panel > 0},
                        upcoming, inputs.tokens);
      }
    }
    inputs.x += inputs.tokens * inputs.stride;
    sums += inputs.tokens * run.sums_stride;
    left -= inputs.tokens;
  }
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
