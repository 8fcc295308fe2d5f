#include "cache/lru.hpp"

namespace zipmoe {

LeastRecentlyUsed::LeastRecentlyUsed(uint32_t record_count)
    : links_(size_t{record_count} + 1), sentinel_(record_count) {
  for (RecordIndex i = 0; i <= record_count; ++i) links_[i] = {i, i};
}

void LeastRecentlyUsed::unlink(RecordIndex record) {
  const Link link = links_[record];
  links_[link.older].newer = link.newer;
  links_[link.newer].older = link.older;
  links_[record] = {record, record};
}

void LeastRecentlyUsed::link_newest(RecordIndex record) {
  const RecordIndex newest = links_[sentinel_].older;  // the ring: sentinel, oldest, ..., newest, sentinel
  links_[record] = {newest, sentinel_};
  links_[newest].newer = record;
  links_[sentinel_].older = record;
}

void LeastRecentlyUsed::admitted(RecordIndex record) { link_newest(record); }

void LeastRecentlyUsed::used(RecordIndex record) {
  unlink(record);
  link_newest(record);
}

void LeastRecentlyUsed::removed(RecordIndex record) { unlink(record); }

std::unique_ptr<EvictionPolicy> LeastRecentlyUsed::holding(std::span<const RecordIndex> residents) const {
  auto policy = std::make_unique<LeastRecentlyUsed>(sentinel_);
  for (const RecordIndex record : residents) policy->admitted(record);
  return policy;
}

std::optional<RecordIndex> LeastRecentlyUsed::victim(const Predicate& evictable) {
  for (RecordIndex record = links_[sentinel_].newer; record != sentinel_; record = links_[record].newer) {
    if (evictable(record)) return record;
  }
  return std::nullopt;
}

}  // namespace zipmoe
