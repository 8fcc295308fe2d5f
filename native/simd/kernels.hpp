// The kernels of the codecs and their selection at run time. Plain C types only: this header is included by the
// translation units that are compiled with wide instructions (see wide_code.hpp).
#pragma once
#include <stdint.h>

namespace zipmoe {

enum class InstructionSet;

namespace simd {

// A run of consecutive row groups of one FX3 panel (docs/format.md, "FX3"). Any bytes in `records`, `index` and
// `exceptions` are safe to decode: no kernel reads outside the records of the run, the `groups` index entries, and
// exceptions[0, exception_count + 64).
struct Fx3Run {
  const uint8_t* records;       // first record of the first group
  const uint8_t* index;         // index entry of the first group, little-endian uint32, any alignment
  const uint8_t* exceptions;    // start of the whole exception stream
  uint64_t exception_count;     // bytes in the stream, without the 64 readable bytes behind it
  const uint8_t* exponents;     // uint8[8]: exponent of each code; [0..6] != 255, [7] == 255
  uint64_t groups;              // row groups of 4 rows
  uint64_t blocks;              // 64-weight blocks of a row in this panel
  uint64_t last_block_columns;  // 1..64: weights of the last block that are written
  uint16_t* out;                // first weight of the run; nothing outside the written weights is touched
  uint64_t out_stride;          // weights from one output row to the next
};

using Fx3Decode = void (*)(const Fx3Run& run);

// out[i] = rotate_right16(exponent[i] << 8 | sign_mantissa[i], 1), that is the BF16 pattern, for i < count.
// `exponent` may be the upper half of `out` (starting at byte `count` of it): results overwrite only consumed bytes.
using Recombine = void (*)(const uint8_t* exponent, const uint8_t* sign_mantissa, uint64_t count, uint16_t* out);

struct Kernels {
  Fx3Decode fx3_decode;
  Recombine recombine;
};

// The instruction set must be supported by this machine.
const Kernels& kernels(InstructionSet instruction_set);

void fx3_decode_scalar(const Fx3Run& run);
void recombine_scalar(const uint8_t* exponent, const uint8_t* sign_mantissa, uint64_t count, uint16_t* out);

#if defined(__x86_64__)
void fx3_decode_avx2(const Fx3Run& run);
void recombine_avx2(const uint8_t* exponent, const uint8_t* sign_mantissa, uint64_t count, uint16_t* out);
void fx3_decode_avx512(const Fx3Run& run);
void recombine_avx512(const uint8_t* exponent, const uint8_t* sign_mantissa, uint64_t count, uint16_t* out);
#endif

}  // namespace simd
}  // namespace zipmoe
