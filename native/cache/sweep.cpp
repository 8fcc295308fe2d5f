#include "cache/sweep.hpp"

#include <algorithm>

namespace zipmoe {

Sweep::Sweep(const std::vector<bool>& experts, uint32_t layers) : layers_(std::max(layers, uint32_t{1})) {
  const auto count = static_cast<uint64_t>(std::ranges::count(experts, true));
  for (const bool expert : experts) {
    layer_of_.push_back(expert ? static_cast<uint32_t>(records_ * layers_ / count) : 0);
    records_ += expert ? 1 : 0;
  }
}

void Sweep::begin() {
  sweeping_ = nearly_all_ = true;
  first_awaited_ = 0;
}

void Sweep::requested(std::span<const RecordIndex> records) {
  // At least half of a layer of the mean size.
  sweeping_ = !records.empty() && 2 * uint64_t{records.size()} * layers_ >= records_;
  nearly_all_ = 5 * uint64_t{records.size()} * layers_ >= 4 * records_;
  if (sweeping_) first_awaited_ = *std::ranges::max_element(records) + 1;
}

}  // namespace zipmoe
