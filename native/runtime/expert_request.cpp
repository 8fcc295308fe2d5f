#include "runtime/expert_request.hpp"

#include <algorithm>
#include <utility>

#include "runtime/stopwatch.hpp"

namespace zipmoe {
ExpertRequest::ExpertRequest(ExpertCache& cache, RecordLoader& loader, std::vector<RecordIndex> records,
                             HandOutOrder order, LookAhead* ahead)
    : cache_(cache), loader_(loader), ahead_(ahead), order_(order), left_(records.size()) {
  cache_.requested(records);
  items_.reserve(records.size());
  for (uint32_t i = 0; i < records.size(); ++i) {
    const bool hit = cache_.resident(records[i]);
    items_.push_back({records[i], i, hit ? State::hit : State::unissued});
    hits_ += hit ? 1 : 0;
  }
  if (order == HandOutOrder::ascending) {
    std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.record < b.record; });
  } else {
    std::stable_partition(items_.begin(), items_.end(), [](const Item& item) { return item.state == State::hit; });
  }
  for (const Item& item : items_) {
    if (item.state == State::hit) cache_.pin(item.record);
  }
  if (ahead_ != nullptr) take_over();
  begin_reads();
}

void ExpertRequest::take_over() {
  for (Item& item : items_) {
    if (item.state != State::unissued) continue;
    const std::optional<LookAhead::Taken> taken = ahead_->take(item.record);
    if (!taken) continue;
    if (!taken->outcome) {
      item.state = State::reading;
      ++reading_;
      ++pending_;
    } else if (taken->outcome->failure) {  // read again: an error is the request's own
      cache_.discard(item.record);
      continue;
    } else {
      cache_.admit(item.record);
      item.state = State::ready;
      ++pending_;
      ready_.push_back(static_cast<size_t>(&item - items_.data()));
    }
    prefetched_ += taken->begun ? 1 : 0;
  }
  ahead_->drop();
}

ExpertRequest::~ExpertRequest() {
  if (reading_ > 0) loader_.cancel();
  while (reading_ > 0) {
    if (const auto outcome = loader_.wait(std::chrono::milliseconds(1000))) settle(*outcome);
  }
  for (const Item& item : items_) {
    if (item.state == State::hit || item.state == State::ready || item.state == State::handed_out) {
      cache_.unpin(item.record);
    }
  }
}

void ExpertRequest::begin_reads() {
  if (ahead_ != nullptr) ahead_->collect();
  for (; next_unissued_ < items_.size(); ++next_unissued_) {
    Item& item = items_[next_unissued_];
    if (item.state != State::unissued) continue;
    // Experts of this layer that are done make room for the next ones, and what later layers hold beyond their share;
    // those of other layers only for as many reads as keep the disk busy until then. Nothing pending: it must go on.
    uint8_t* slot = cache_.acquire(item.record, spared());
    if (slot == nullptr) return;
    item.state = State::reading;
    ++reading_;
    ++pending_;
    loader_.start(item.record, slot);
  }
  if (ahead_ != nullptr) ahead_->go_on();
}

Spared ExpertRequest::spared() const {
  const TurningSlots turning = cache_.turning();
  // Pending are experts that are being read, or are there, read ahead perhaps, and wait for being handed out.
  if (reading_ < turning.reading && pending_ < turning.all()) return Spared::nobody;
  if (order_ == HandOutOrder::ascending && next_unissued_ == head_) return Spared::nobody;  // all wait for this one
  if (reading_ >= turning.reading || choose()) return Spared::other_layers;
  return reading_ > 0 ? Spared::awaited : Spared::nobody;  // ascending, and those that are there come later
}

// Ascending order only. When hits with larger numbers hold all the slots that the next expert could use, the largest of
// them gives way and is read again later. Each record is still read at most once by this request.
void ExpertRequest::make_room_for_head() {
  while (items_[head_].state == State::unissued) {
    const uint32_t size_class = cache_.size_class(items_[head_].record);
    size_t sacrifice = items_.size();
    while (--sacrifice > head_) {
      if (items_[sacrifice].state == State::hit && cache_.size_class(items_[sacrifice].record) == size_class) break;
    }
    if (sacrifice == head_) return;  // the slots are with reads under way, or with records that others pinned
    Item& item = items_[sacrifice];
    cache_.unpin(item.record);
    if (!cache_.pinned(item.record)) cache_.evict(item.record);
    item.state = State::unissued;
    --hits_;
    begin_reads();
  }
}

void ExpertRequest::settle(const LoadOutcome& outcome) {
  const auto found = std::find_if(items_.begin(), items_.end(), [&](const Item& item) {
    return item.record == outcome.record && item.state == State::reading;
  });
  if (found == items_.end()) return;
  --reading_;
  if (outcome.failure) {
    --pending_;
    cache_.discard(outcome.record);
    found->state = State::released;
    if (!failure_) {
      failure_ = outcome.failure;
      failed_record_ = outcome.record;
    }
    return;
  }
  cache_.admit(outcome.record);
  found->state = State::ready;
  ready_.push_back(static_cast<size_t>(found - items_.begin()));
}

std::optional<size_t> ExpertRequest::choose() const {
  // Whoever has been read gives its slot to a read that waits for one: the disk goes on while hits are computed.
  if (order_ == HandOutOrder::as_available && next_unissued_ < items_.size() && !ready_.empty() &&
      cache_.size_class(items_[ready_.front()].record) == cache_.size_class(items_[next_unissued_].record)) {
    return ready_.front();
  }
  if (head_ < items_.size()) {
    const State state = items_[head_].state;
    if (state == State::hit || (order_ == HandOutOrder::ascending && state == State::ready)) return head_;
  }
  if (order_ == HandOutOrder::as_available && !ready_.empty()) return ready_.front();
  return std::nullopt;
}

void ExpertRequest::release_current() {
  if (!current_) return;
  cache_.unpin(items_[*current_].record);
  items_[*current_].state = State::released;
  current_.reset();
}

bool ExpertRequest::take_all() {
  const auto is_there = [](const Item& item) { return item.state == State::hit || item.state == State::ready; };
  if (failure_ || left_ != items_.size() || !std::all_of(items_.begin(), items_.end(), is_there)) return false;
  for (Item& item : items_) {
    if (item.state == State::ready) --pending_;
    item.state = State::handed_out;
    cache_.used(item.record);
  }
  ready_.clear();
  head_ = items_.size();
  left_ = 0;
  return true;
}

RequestStep ExpertRequest::next(std::chrono::milliseconds timeout) {
  release_current();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (const auto outcome = loader_.poll()) settle(*outcome);
  for (;;) {
    if (failure_) throw RecordError(failure_->fault, failed_record_, failure_->message);
    if (left_ == 0) return {RequestStep::Kind::finished};
    begin_reads();
    if (order_ == HandOutOrder::ascending) make_room_for_head();
    if (const std::optional<size_t> chosen = choose()) {
      Item& item = items_[*chosen];
      if (item.state == State::ready) --pending_;
      if (order_ == HandOutOrder::as_available && item.state == State::ready) {
        ready_.pop_front();
      } else {
        ++head_;
      }
      item.state = State::handed_out;
      cache_.used(item.record);
      current_ = chosen;
      --left_;
      return {RequestStep::Kind::record, item.position};
    }
    const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (remaining.count() <= 0) return {RequestStep::Kind::waiting};
    const Stopwatch stopwatch(wait_seconds_);
    if (const auto outcome = loader_.wait(remaining)) settle(*outcome);
  }
}

}  // namespace zipmoe
