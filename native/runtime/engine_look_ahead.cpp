// Look-ahead to the next layer's experts, with one pool of whole records.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/engine.hpp"

namespace zipmoe {

void Engine::enable_look_ahead(uint32_t slots) {
  std::lock_guard lock(mutex_);
  require_open();
  if (pool_memory_) throw std::logic_error("experts are predicted for one pool of whole records only");
  cache_->spare(slots);
  for (uint32_t size_class = 0; size_class < cache_->classes().size(); ++size_class) resize_ghosts(size_class);
  if (!look_ahead_) look_ahead_ = std::make_unique<LookAhead>(table_, *cache_, *loader_);
}

void Engine::predict(std::vector<RecordIndex> records) {
  std::lock_guard lock(mutex_);
  require_open();
  if (!look_ahead_) return;
  require_experts(records);
  predicted_ = std::move(records);
  if (request_) start_predicted();
}

std::vector<size_t> Engine::predict_next(const std::vector<RecordIndex>& records, bool pass) {
  std::lock_guard lock(mutex_);
  require_open();
  if (!look_ahead_ || request_) return {};
  require_experts(records);
  std::vector<size_t> absent;
  for (size_t i = 0; i < records.size(); ++i) {
    if (!cache_->resident(records[i])) absent.push_back(i);
  }
  predicted_.clear();
  if (pass && cache_->sweeping()) {  // what was begun for this request goes on, whether or not it is among these
    look_ahead_->predict_in_sweep(records);
    look_ahead_->go_on();
  } else {
    look_ahead_->drop();  // what was predicted before is for a request that never came
    look_ahead_->predict(records);
  }
  return absent;
}

void Engine::predict_sweep(std::vector<RecordIndex> records) {
  std::lock_guard lock(mutex_);
  require_open();
  if (request_) throw std::logic_error("a pass begins with its first request");
  if (!look_ahead_) return;
  require_experts(records);
  look_ahead_->predict_sweep(std::move(records));
}

// Not of experts that the open request is for, which may yet be waiting for a slot.
void Engine::start_predicted() {
  if (!look_ahead_) return;
  std::erase_if(predicted_,
                [this](RecordIndex record) { return std::ranges::find(requested_, record) != requested_.end(); });
  if (!cache_->sweeping()) return look_ahead_->predict(std::exchange(predicted_, {}));
  look_ahead_->predict_in_sweep(std::exchange(predicted_, {}));
  request_->begin_reads();
}

void Engine::require_experts(std::span<const RecordIndex> records) const {
  for (const RecordIndex record : records) {
    if (record >= table_.size() || options_.class_of_record[record] == ExpertCache::kNotCached) {
      throw std::invalid_argument("record " + std::to_string(record) + " is not an expert");
    }
  }
}

}  // namespace zipmoe
