#include "cache/lfu.hpp"

namespace zipmoe {

void LeastFrequentlyUsed::requested(std::span<const RecordIndex> records) {
  for (const RecordIndex record : records) order_.set_priority(record, counts_.at(record) += 1);
}

}  // namespace zipmoe
