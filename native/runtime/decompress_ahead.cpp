#include "runtime/decompress_ahead.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace zipmoe {
namespace {

const PlanarCodec& planar(const Codec& codec) {
  const auto* found = dynamic_cast<const PlanarCodec*>(&codec);
  if (found == nullptr) throw std::invalid_argument("only exponents that are held apart can be decompressed ahead");
  return *found;
}

}  // namespace

DecompressAhead::DecompressAhead(const RecordTable& table, uint32_t workers)
    : table_(table), codec_(planar(table.codec())), workers_(workers) {
  if (workers == 0) throw std::invalid_argument("decompressing ahead needs at least one worker");
  threads_.reserve(workers);
  for (uint32_t i = 0; i < workers; ++i) threads_.emplace_back([this] { serve(); });
}

DecompressAhead::~DecompressAhead() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void DecompressAhead::begin(std::vector<RecordIndex> experts, std::vector<ShardTask> priority,
                            std::vector<uint8_t*> buffers) {
  std::lock_guard lock(mutex_);
  experts_.clear();
  for (const RecordIndex record : experts) {
    Expert& expert = experts_.emplace_back();
    expert.record = record;
    for (const RecordMatrix& matrix : table_[record].matrices) {
      expert.first_shard.push_back(static_cast<uint32_t>(expert.shards.size()));
      // Claimed until the order names them: experts in F have nothing to decompress.
      expert.shards.resize(expert.shards.size() + matrix.shard_bytes.size(), ShardState::claimed);
    }
  }
  priority_ = std::move(priority);
  first_ = 0;
  for (const ShardTask& task : priority_) {
    state(task) = ShardState::waiting;
    ++experts_[task.expert].unfinished;
  }
  free_buffers_ = std::move(buffers);
}

void DecompressAhead::end() {
  std::unique_lock lock(mutex_);
  priority_.clear();
  first_ = 0;
  ended_.wait(lock, [this] { return under_way_ == 0; });
  experts_.clear();
  free_buffers_.clear();
}

void DecompressAhead::expect(uint32_t expert, const uint8_t* exponent_part, bool there) {
  {
    std::lock_guard lock(mutex_);
    experts_.at(expert).exponent_part = exponent_part;
    experts_.at(expert).there = there;
  }
  if (there) work_.notify_all();
}

void DecompressAhead::parts_arrived(RecordIndex record, const std::array<bool, 2>& parts) noexcept {
  if (!parts[0]) return;
  {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(experts_.begin(), experts_.end(),
                                    [record](const Expert& expert) { return expert.record == record; });
    if (found == experts_.end()) return;  // a dense record, or the request is over
    found->there = true;
  }
  work_.notify_all();
}

void DecompressAhead::withdraw(uint32_t number) {
  std::unique_lock lock(mutex_);
  if (experts_.empty()) return;
  Expert& expert = experts_.at(number);
  expert.there = false;
  ended_.wait(lock, [&] { return expert.under_way == 0; });
  expert.exponent_part = nullptr;
  for (ShardState& shard : expert.shards) {
    if (shard != ShardState::done && shard != ShardState::failed) continue;
    shard = ShardState::waiting;
    ++expert.unfinished;
  }
  first_ = 0;
  expert.failure.clear();
  if (expert.buffer == nullptr) return;
  free_buffers_.push_back(std::exchange(expert.buffer, nullptr));
  lock.unlock();
  work_.notify_all();
}

bool DecompressAhead::complete(uint32_t expert) const {
  std::lock_guard lock(mutex_);
  return experts_.at(expert).unfinished == 0;
}

bool DecompressAhead::help() {
  std::unique_lock lock(mutex_);
  const std::optional<ShardTask> task = take();
  if (!task) return false;
  decompress(lock, *task);
  lock.unlock();
  work_.notify_one();  // a worker may have found that L shards were under way
  return true;
}

DecompressAhead::Claim DecompressAhead::claim(uint32_t number, uint32_t matrix, uint32_t shard_begin,
                                              uint32_t shard_end) {
  std::lock_guard lock(mutex_);
  demanded_ = true;
  Expert& expert = experts_.at(number);
  Claim claim;
  if (expert.buffer != nullptr) claim.exponents = expert.buffer + table_.exponent_offset(expert.record, matrix);
  for (uint32_t shard = shard_begin; shard < shard_end; ++shard) {
    ShardState& found = state({number, matrix, shard});
    if (found == ShardState::waiting) {
      found = ShardState::claimed;
      --expert.unfinished;
    }
    claim.shards.push_back(found);
  }
  return claim;
}

void DecompressAhead::release() {
  {
    std::lock_guard lock(mutex_);
    demanded_ = false;
  }
  work_.notify_all();
}

void DecompressAhead::await(uint32_t number, uint32_t matrix, uint32_t shard) const {
  std::unique_lock lock(mutex_);
  const Expert& expert = experts_.at(number);
  const ShardState& found = expert.shards.at(expert.first_shard.at(matrix) + shard);
  ended_.wait(lock, [&] { return found != ShardState::under_way; });
  if (found == ShardState::failed) throw FormatError(expert.failure);
}

DecompressAhead::Counters DecompressAhead::counters() const {
  std::lock_guard lock(mutex_);
  return counters_;
}

DecompressAhead::ShardState& DecompressAhead::state(const ShardTask& task) {
  Expert& expert = experts_.at(task.expert);
  return expert.shards.at(expert.first_shard.at(task.tensor) + task.shard);
}

std::optional<ShardTask> DecompressAhead::take() {
  if (demanded_ || under_way_ >= workers_) return std::nullopt;
  for (size_t i = first_; i < priority_.size(); ++i) {
    const ShardTask& task = priority_[i];
    Expert& expert = experts_[task.expert];
    if (state(task) != ShardState::waiting) {
      if (i == first_) ++first_;
      continue;
    }
    if (!expert.there) continue;
    if (expert.buffer == nullptr) {
      if (free_buffers_.empty()) continue;
      expert.buffer = free_buffers_.back();
      free_buffers_.pop_back();
    }
    state(task) = ShardState::under_way;
    ++expert.under_way;
    ++under_way_;
    return task;
  }
  return std::nullopt;
}

void DecompressAhead::decompress(std::unique_lock<std::mutex>& lock, const ShardTask& task) {
  Expert& expert = experts_[task.expert];  // stays where it is while one of its shards is under way
  const MatrixView view = table_.view(expert.record, task.tensor, PartPlaces{expert.exponent_part, nullptr});
  const RowRange rows = shard_rows(view.shape.rows, view.shard_bytes.size(), task.shard);
  uint8_t* out = expert.buffer + table_.exponent_offset(expert.record, task.tensor) + rows.begin * view.shape.columns;
  const uint64_t bytes = (rows.end - rows.begin) * view.shape.columns;
  lock.unlock();
  const auto begin = std::chrono::steady_clock::now();
  std::optional<std::string> failure;
  try {
    codec_.decompress_shard_of(view, task.shard, {out, bytes});
  } catch (const std::exception& error) {
    failure = error.what();
  }
  const auto elapsed = std::chrono::steady_clock::now() - begin;
  lock.lock();
  counters_.seconds += std::chrono::duration<double>(elapsed).count();
  counters_.bytes += bytes;
  state(task) = failure ? ShardState::failed : ShardState::done;
  if (failure && expert.failure.empty()) expert.failure = std::move(*failure);
  --expert.unfinished;
  --expert.under_way;
  --under_way_;
  ended_.notify_all();
}

void DecompressAhead::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::optional<ShardTask> task;
    work_.wait(lock, [&] { return stopping_ || (task = take()); });
    if (stopping_) return;
    decompress(lock, *task);
  }
}

}  // namespace zipmoe
