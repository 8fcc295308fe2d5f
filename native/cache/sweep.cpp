#include "cache/sweep.hpp"

#include <algorithm>

namespace zipmoe {

void Sweep::begin() {
  sweeping_ = true;
  first_awaited_ = 0;
}

void Sweep::requested(std::span<const RecordIndex> records) {
  // At least half of a layer of the mean size.
  sweeping_ = !records.empty() && 2 * records.size() * layers_ >= records_;
  if (sweeping_) first_awaited_ = *std::ranges::max_element(records) + 1;
}

}  // namespace zipmoe
