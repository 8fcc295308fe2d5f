// Whole matrices decoded by all workers together, as a request decodes them, timed.
#pragma once

#include <cstdint>
#include <span>

#include "codec/codec.hpp"
#include "runtime/row_decoder.hpp"

namespace zipmoe {

class TimedDecoder {
 public:
  TimedDecoder(const Codec& codec, InstructionSet instruction_set, uint32_t workers)
      : decoder_(codec, instruction_set, workers) {}

  // Decodes `units` matrices, taking the given ones again and again in order, into `out`, which holds the largest.
  // Returns seconds; throws FormatError.
  double decode(std::span<const MatrixView> matrices, uint64_t units, std::span<uint16_t> out);

  uint32_t workers() const { return decoder_.threads(); }

 private:
  RowDecoder decoder_;
};

}  // namespace zipmoe
