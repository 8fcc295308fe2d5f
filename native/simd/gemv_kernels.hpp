// Kernels of y = W x on weights as they lie in memory, packed or raw, for one or more tokens (docs/compute.md). Plain C
// types only: this header is included by the translation units that are compiled with wide instructions (see
// wide_code.hpp).
//
// All kernels accumulate in one canonical order, so that every instruction set gives the same bits (except that any NaN
// stands for any other NaN). Per row, token and panel of columns there are 16 fp32 lanes, at first +0. For every 32
// columns lane i takes fma(w[2i + 1], x[2i + 1], lane), then fma(w[2i], x[2i], lane). At the end of the panel lane i
// takes lane i + 8, then i + 4, i + 2, i + 1, and the panel's sum is added to those of the panels before it. Columns
// are padded with zeros to a multiple of 64. Denormal inputs count as zeros of their sign, and so do results that are
// tiny after rounding: this is what vdpbf16ps does, here demanded of every step.
#pragma once
#include <stdint.h>

#include "simd/activation_kernels.hpp"

namespace zipmoe {

enum class InstructionSet;

namespace simd {

// Tokens of the kernels that read every weight once for all of them, and of those that bring a few rows to the cache,
// where their inputs stay too.
constexpr uint64_t kGemvTokensMax = 3;
constexpr uint64_t kGemmTokensMax = 48;
constexpr uint64_t kGemvLanes = 16;
// From this number of tokens on, AVX-512 kernels do better where rows are unpacked once (docs/compute.md).
constexpr uint64_t kUnpackedTokensMin = 20;

// The inputs of some tokens from the first panel that is used on: BF16, zeros up to a multiple of 64 columns. The
// values of each panel lie together: where those of another one lay between two tokens', what the processor fetches on
// its own behind a token's would be of no use (docs/results/packed_gemm.md).
struct GemvInputs {
  const uint16_t* x;  // 64-byte aligned
  uint64_t stride;    // values from one token to the next, multiple of 32
  uint64_t tokens;
  uint64_t panel_step;  // values from one panel to the next, multiple of 32
};

// A run of consecutive row groups of one FX3 panel; what must be readable is as in Fx3Run (kernels.hpp).
struct Fx3GemvRun {
  const uint8_t* records;
  const uint8_t* index;
  const uint8_t* exceptions;
  uint64_t exception_count;
  const uint8_t* exponents;
  uint64_t groups;
  uint64_t blocks;    // 64-column blocks of a row in this panel
  GemvInputs inputs;  // from the panel's first column on
  float* sums;        // [tokens][sums_stride]: 4 * groups rows are written
  uint64_t sums_stride;
  bool add;  // to what is in `sums` (a panel that is not the first)
};

// A run of consecutive rows of a row-major BF16 matrix, all panels.
struct BFloat16GemvRun {
  const uint16_t* weights;
  uint64_t rows;
  uint64_t columns;
  uint64_t panel_columns;  // multiple of 64
  GemvInputs inputs;       // from the first column on
  float* sums;             // [tokens][sums_stride]: `rows` are written, rounded up to a multiple of 4
  uint64_t sums_stride;
};

// Rows that were unpacked for many tokens, [panel][group][block][row of the group][64], padded with zeros.
struct UnpackedGemvRun {
  const uint16_t* weights;  // 64-byte aligned
  uint64_t panels;
  uint64_t groups;
  uint64_t blocks;    // 64-column blocks of a row in a panel
  GemvInputs inputs;  // from the first column on, any number of tokens
  float* sums;        // [tokens][sums_stride]: 4 * groups rows are written
  uint64_t sums_stride;
  // What the caller reads next: fetched meanwhile. Nothing happens if it cannot be read.
  const void* upcoming;
  uint64_t upcoming_bytes;
};

struct GemvKernels {
  // 1 .. kGemvTokensMax tokens
  void (*fx3)(const Fx3GemvRun& run);
  void (*bfloat16)(const BFloat16GemvRun& run);
  // kGemvTokensMax + 1 .. kGemmTokensMax tokens
  void (*fx3_many)(const Fx3GemvRun& run);
  void (*bfloat16_many)(const BFloat16GemvRun& run);
  // From this number of tokens on, rows are unpacked once and then multiplied with all tokens; 0: never, and the two
  // are null. `fx3_unpack` reads only what describes the weights, and writes one panel of UnpackedGemvRun.
  uint64_t unpacked_tokens_min;
  void (*fx3_unpack)(const Fx3GemvRun& run, uint16_t* weights);
  void (*unpacked)(const UnpackedGemvRun& run);
  Gate gate;
};

// The set whose kernels gemv_kernels() gives: AVX-512 needs the BF16 dot product, without it AVX2 is used.
InstructionSet gemv_instruction_set(InstructionSet instruction_set) noexcept;

// The instruction set must be supported by this machine.
const GemvKernels& gemv_kernels(InstructionSet instruction_set) noexcept;

void fx3_gemv_scalar(const Fx3GemvRun& run);
void bfloat16_gemv_scalar(const BFloat16GemvRun& run);

#if defined(__x86_64__)
void fx3_gemv_avx2(const Fx3GemvRun& run);
void bfloat16_gemv_avx2(const BFloat16GemvRun& run);
void fx3_gemm_avx2(const Fx3GemvRun& run);
void bfloat16_gemm_avx2(const BFloat16GemvRun& run);
void fx3_gemv_avx512(const Fx3GemvRun& run);
void bfloat16_gemv_avx512(const BFloat16GemvRun& run);
void fx3_gemm_avx512(const Fx3GemvRun& run);
void bfloat16_gemm_avx512(const BFloat16GemvRun& run);
void fx3_unpack_avx512(const Fx3GemvRun& run, uint16_t* weights);
void unpacked_gemm_avx512(const UnpackedGemvRun& run);
#endif

}  // namespace simd
}  // namespace zipmoe
