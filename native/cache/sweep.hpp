// Passes that ask every sparse layer for most of its experts (prompts, large batches), one layer after the other: what
// is resident of the layers to come will be asked for before anything of the layers that are done is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/eviction_policy.hpp"

namespace zipmoe {

// Reads ahead that others make room for. As many slots go round from layer to layer; with more of them fewer records
// would stay from one pass to the next.
inline constexpr uint32_t kSweepReads = 10;
// Reads of the layer at hand that others make room for; with fewer, the disk might run dry.
inline constexpr uint32_t kReadingThatEvictOthers = 8;

// Slots that go round in a pass.
struct TurningSlots {
  uint32_t ahead;    // reads for the next layer
  uint32_t reading;  // reads of the layer at hand

  uint32_t all() const { return ahead + reading; }
};

inline constexpr TurningSlots kTurningInPrompts{kSweepReads, kReadingThatEvictOthers};
// Steps of many sequences, which ask for some of every layer, compute little for each expert: so many reads keep the
// disk busy, and more records stay (docs/results/look_ahead.md).
inline constexpr TurningSlots kTurningInSteps{5, 6};

class Sweep {
 public:
  // `experts`: by record, whether it is one; `layers`: requests that make one pass, taken to be equal parts.
  Sweep(const std::vector<bool>& experts, uint32_t layers);

  // Such a pass is about to begin: all that is resident is awaited.
  void begin();
  // A layer asks for these records.
  void requested(std::span<const RecordIndex> records);

  // Whether the last request was part of such a pass, or one is about to begin.
  bool sweeping() const { return sweeping_; }

  TurningSlots turning() const { return sweeping_ && !nearly_all_ ? kTurningInSteps : kTurningInPrompts; }

  // Whether the pass at hand is likely to ask for the record in a layer to come. Records are numbered layer by layer,
  // in the order in which a pass asks for them; where they are not, the answer costs reads and nothing else.
  bool awaited(RecordIndex record) const { return sweeping_ && record >= first_awaited_; }

  // The layer at hand asks for records of this part.
  bool at_hand(RecordIndex record) const {
    return sweeping_ && first_awaited_ > 0 && layer(record) == layer(first_awaited_ - 1);
  }

  uint32_t layers() const { return layers_; }
  uint32_t layer(RecordIndex record) const { return layer_of_.at(record); }

 private:
  const uint32_t layers_;
  std::vector<uint32_t> layer_of_;
  uint64_t records_ = 0;
  bool sweeping_ = false;
  bool nearly_all_ = false;        // of a layer was asked for, or will be
  RecordIndex first_awaited_ = 0;  // behind the last one of the layer at hand
};

}  // namespace zipmoe
