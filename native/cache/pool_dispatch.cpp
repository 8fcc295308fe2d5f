#include "cache/pool_dispatch.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace zipmoe {
namespace {

constexpr double kLargestActivation = 1e100;

double growth_per_request(double half_life_requests) {
  if (!(half_life_requests > 0)) throw std::invalid_argument("the half-life of counts must be positive");
  return std::exp2(1 / half_life_requests);  // infinite half-life: 1
}

}  // namespace

RankDispatch::RankDispatch(const RankDispatchOptions& options)
    : slots_(options.slots),
      tolerance_(options.tolerance),
      growth_(growth_per_request(options.half_life_requests)),
      entries_(options.experts) {
  if (!(options.tolerance >= 0)) throw std::invalid_argument("the tolerance of ranks must not be negative");
}

uint32_t RankDispatch::rank(uint32_t expert) const {
  const double count = entries_[expert].count;
  return static_cast<uint32_t>(
      std::count_if(entries_.begin(), entries_.end(), [count](const Entry& entry) { return entry.count > count; }));
}

Residency RankDispatch::target(uint32_t expert) const {
  const double own_rank = rank(expert);
  double threshold = tolerance_;
  for (Residency pool = Residency::full; pool != Residency::miss; pool = next_pool(pool)) {
    threshold += slots_[pool];
    if (has_slots(pool) && own_rank < threshold) return pool;
  }
  return Residency::miss;
}

bool RankDispatch::worth_less(uint32_t a, uint32_t b) const {
  const Entry& first = entries_[a];
  const Entry& second = entries_[b];
  if (first.count != second.count) return first.count < second.count;
  return first.last_request < second.last_request;
}

std::optional<uint32_t> RankDispatch::victim(Residency pool) const {
  std::optional<uint32_t> least;
  for (uint32_t expert = 0; expert < entries_.size(); ++expert) {
    if (entries_[expert].residency != pool || entries_[expert].requested) continue;
    if (!least || worth_less(expert, *least)) least = expert;
  }
  return least;
}

void RankDispatch::set(uint32_t expert, Residency residency) {
  Entry& entry = entries_[expert];
  if (entry.residency != Residency::miss) --occupied_[entry.residency];
  if (residency != Residency::miss) ++occupied_[residency];
  entry.residency = residency;
}

// Into a pool, if it has a slot or holds somebody who is worth less.
bool RankDispatch::enter(uint32_t expert, Residency pool) {
  if (!has_slots(pool)) return false;
  if (occupied_[pool] >= slots_[pool]) {
    const std::optional<uint32_t> loser = victim(pool);
    if (!loser || !worth_less(*loser, expert)) return false;
    move_on(*loser);
  }
  set(expert, pool);
  return true;
}

// A victim goes to the next pool that takes it, or out.
void RankDispatch::move_on(uint32_t expert) {
  const Residency from = entries_[expert].residency;
  Residency pool = std::max(next_pool(from), target(expert));
  set(expert, Residency::miss);
  for (; pool != Residency::miss; pool = next_pool(pool)) {
    if (contains(from, pool) && enter(expert, pool)) return;
  }
}

void RankDispatch::place_requested(uint32_t expert) {
  const Residency present = entries_[expert].residency;
  set(expert, Residency::miss);  // whoever makes room may take the slot that becomes free
  for (Residency pool = target(expert); pool < present; pool = next_pool(pool)) {
    if (enter(expert, pool)) return;
  }
  set(expert, present);
}

void RankDispatch::count_activation(uint32_t expert) {
  entries_[expert].count += activation_;
  entries_[expert].last_request = requests_;
}

std::vector<PoolMove> RankDispatch::changes_since(const std::vector<Residency>& before) const {
  std::vector<PoolMove> moves;
  for (uint32_t expert = 0; expert < entries_.size(); ++expert) {
    if (entries_[expert].residency != before[expert]) moves.push_back({expert, entries_[expert].residency});
  }
  return moves;
}

std::vector<PoolMove> RankDispatch::request(std::span<const uint32_t> experts) {
  for (const uint32_t expert : experts) {
    if (expert >= entries_.size()) throw std::out_of_range("no such expert");
  }
  std::vector<Residency> before;
  for (const Entry& entry : entries_) before.push_back(entry.residency);
  ++requests_;
  activation_ *= growth_;
  if (activation_ > kLargestActivation) {
    for (Entry& entry : entries_) entry.count /= activation_;
    activation_ = 1;
  }
  for (const uint32_t expert : experts) {
    entries_[expert].requested = true;
    count_activation(expert);
  }
  for (const uint32_t expert : experts) place_requested(expert);
  for (const uint32_t expert : experts) entries_[expert].requested = false;
  return changes_since(before);
}

void RankDispatch::correct(uint32_t expert, Residency actual) {
  if (expert >= entries_.size()) throw std::out_of_range("no such expert");
  set(expert, actual);
}

std::vector<PoolMove> RankDispatch::resize(const PoolSlots& slots) {
  std::vector<Residency> before;
  for (const Entry& entry : entries_) before.push_back(entry.residency);
  slots_ = slots;
  for (Residency pool = Residency::full; pool != Residency::miss; pool = next_pool(pool)) {
    while (occupied_[pool] > slots_[pool]) move_on(*victim(pool));
  }
  return changes_since(before);
}

}  // namespace zipmoe
