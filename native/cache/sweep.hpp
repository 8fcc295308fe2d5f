// Passes that ask every sparse layer for most of its experts (prompts, large batches), one layer after the other: what
// is resident of the layers to come will be asked for before anything of the layers that are done is.
#pragma once

#include <cstdint>
#include <span>

#include "cache/eviction_policy.hpp"

namespace zipmoe {

class Sweep {
 public:
  // `records`: in all layers; `layers`: requests that make one pass.
  Sweep(uint64_t records, uint32_t layers) : records_(records), layers_(layers) {}

  // Such a pass is about to begin: all that is resident is awaited.
  void begin();
  // A layer asks for these records.
  void requested(std::span<const RecordIndex> records);

  // Whether the last request was part of such a pass, or one is about to begin.
  bool sweeping() const { return sweeping_; }

  // Whether the pass at hand is likely to ask for the record in a layer to come. Records are numbered layer by layer,
  // in the order in which a pass asks for them; where they are not, the answer costs reads and nothing else.
  bool awaited(RecordIndex record) const { return sweeping_ && record >= first_awaited_; }

 private:
  const uint64_t records_;
  const uint64_t layers_;
  bool sweeping_ = false;
  RecordIndex first_awaited_ = 0;  // behind the last one of the layer at hand
};

}  // namespace zipmoe
