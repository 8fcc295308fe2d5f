#include "cache/sweep.hpp"

#include <algorithm>

namespace zipmoe {

void Sweep::requested(std::span<const RecordIndex> records) {
  // At least half of a layer of the mean size.
  sweeping_ = !records.empty() && 2 * records.size() * layers_ >= records_;
  if (sweeping_) last_ = *std::ranges::max_element(records);
}

}  // namespace zipmoe
