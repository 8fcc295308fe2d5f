#include "cache/lfuda.hpp"

namespace zipmoe {

void LeastFrequentlyUsedWithAgeing::requested(std::span<const RecordIndex> records) {
  for (const RecordIndex record : records) counts_.at(record) += 1;
}

void LeastFrequentlyUsedWithAgeing::removed(RecordIndex record) {
  age_ = order_.priority(record);
  order_.remove(record);
}

}  // namespace zipmoe
