#include "runtime/pooled_request.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/full_demotion.hpp"

namespace zipmoe {
namespace {

bool executable(Residency residency) { return residency <= Residency::both_chunks; }

}  // namespace

PooledRequest::PooledRequest(const PoolContext& context, std::vector<RecordIndex> records, std::vector<uint32_t> tokens,
                             HandOutOrder order)
    : context_(context), order_(order), left_(records.size()) {
  if (records.empty()) return;
  PoolMemory& memory = context_.memory;
  const uint32_t group = memory.expert(records.front()).group;
  if (!tokens.empty() && tokens.size() != records.size()) throw std::invalid_argument("one token count per expert");
  std::vector<uint32_t> experts;
  for (const RecordIndex record : records) {
    const PoolMemory::Expert expert = memory.expert(record);
    if (expert.group != group) throw std::invalid_argument("a request is for experts of one group");
    experts.push_back(expert.number);
  }
  std::unordered_map<uint32_t, Residency> moves;
  for (const Transition& move : context_.dispatch.access(experts).transitions) {
    moves.insert_or_assign(move.expert, move.to);
  }
  items_.reserve(records.size());
  for (uint32_t i = 0; i < records.size(); ++i) {
    const Residency residency = memory.residency(records[i]);
    ++by_residency_.at(static_cast<size_t>(residency));
    const auto move = moves.extract(experts[i]);
    items_.push_back({.record = records[i],
                      .expert = experts[i],
                      .position = i,
                      .tokens = tokens.empty() ? 1 : tokens[i],
                      .state = executable(residency) ? State::ready : State::unissued,
                      .destination = move.empty() ? residency : move.mapped(),
                      .staged = {}});
  }
  auto leaving_full = move_others(group, moves);  // `moves` holds those that were not asked for
  if (order == HandOutOrder::ascending) {
    std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.expert < b.expert; });
    // Reads in the order of handing out: whoever holds staging slots is handed out before whoever waits for them.
    for (uint32_t i = 0; i < items_.size(); ++i) reads_.push_back(i);
  } else {
    for (uint32_t i = 0; i < items_.size(); ++i) {
      if (items_[i].state == State::ready) ready_.push_back(i);
    }
    reads_ = affinity_order();
  }
  issue_reads();
  // While the disk works; nobody takes their slots in F before the first expert is handed out.
  for (auto& [record, staged] : leaving_full) {
    demote_to_sign_mantissa(context_.table, memory, record, std::move(staged));
  }
}

std::vector<std::pair<RecordIndex, StagedParts>> PooledRequest::move_others(
    uint32_t group, const std::unordered_map<uint32_t, Residency>& moves) {
  PoolMemory& memory = context_.memory;
  std::vector<std::pair<RecordIndex, StagedParts>> leaving_full;
  for (const auto& [expert, to] : moves) {
    const RecordIndex record = memory.groups()[group].experts[expert];
    if (memory.residency(record) == Residency::full && to == Residency::sign_mantissa) {
      leaving_full.emplace_back(record, StagedParts{});
    } else {
      memory.settle(record, {}, to);
    }
  }
  // Their slots may be those of the others, or staging slots: the dispatch moves no more experts than there are.
  for (auto& [record, staged] : leaving_full) {
    if (!memory.stage_sign_mantissa(record, staged)) throw std::logic_error("no slot for an expert that leaves F");
  }
  return leaving_full;
}

PooledRequest::~PooledRequest() {
  release_current();
  if (reading_ > 0) context_.loader.cancel();
  while (reading_ > 0) {
    if (const auto outcome = context_.loader.wait(std::chrono::milliseconds(1000))) settle(*outcome);
  }
  // Who was not handed out: first those that can be where they belong, then the others, as far as there is room.
  std::vector<Item*> others;
  for (Item& item : items_) {
    if (item.state == State::released) continue;
    const Residency present = context_.memory.residency(item.record);
    const bool arrived = item.state == State::ready && !executable(present);
    if (contains(arrived ? Residency::both_chunks : present, item.destination)) {
      context_.memory.settle(item.record, std::move(item.staged), item.destination);
    } else {
      others.push_back(&item);
    }
  }
  for (Item* item : others) {
    if (!keep_what_is_there(*item)) context_.memory.settle(item->record, {}, Residency::miss);
    context_.dispatch.correct(item->expert, context_.memory.residency(item->record));
  }
}

bool PooledRequest::keep_what_is_there(Item& item) {
  PoolMemory& memory = context_.memory;
  const uint32_t group = memory.expert(item.record).group;
  const PoolSlots& slots = memory.groups()[group].slots;
  const Residency present = memory.residency(item.record);
  const auto arrived = item.state == State::ready && !executable(present);
  if (arrived && memory.held(group)[Residency::both_chunks] < slots[Residency::both_chunks]) {
    memory.settle(item.record, std::move(item.staged), Residency::both_chunks);
    return true;
  }
  item.staged = {};
  return present != Residency::miss && memory.held(group)[present] <= slots[present];
}

std::vector<uint32_t> PooledRequest::affinity_order() const {
  std::vector<uint32_t> ascending(items_.size());
  for (uint32_t i = 0; i < ascending.size(); ++i) ascending[i] = i;
  std::sort(ascending.begin(), ascending.end(),
            [&](uint32_t a, uint32_t b) { return items_[a].expert < items_[b].expert; });
  const bool separable = context_.memory.parts() == kPartsMax;
  std::vector<ReadDemand> demands;
  uint32_t shards = 1;
  for (const uint32_t i : ascending) {
    const Item& item = items_[i];
    ReadDemand demand{.residency = context_.memory.residency(item.record), .tokens = item.tokens};
    for (const RecordMatrix& matrix : context_.table[item.record].matrices) {
      demand.weights += matrix.shape.rows * matrix.shape.columns;
      shards = std::max(shards, static_cast<uint32_t>(matrix.shard_bytes.size()));
    }
    (separable ? demand.exponent_bytes : demand.sign_mantissa_bytes) = context_.table.part(item.record, 0).length;
    if (separable) demand.sign_mantissa_bytes = context_.table.part(item.record, 1).length;
    demands.push_back(demand);
  }
  const ChunkLayout layout = separable ? ChunkLayout::separable(shards) : ChunkLayout::fused();
  std::vector<uint32_t> order = order_of_reads(demands, layout, context_.workers, context_.rates, context_.read_order);
  for (uint32_t& index : order) index = ascending[index];
  return order;
}

void PooledRequest::issue_reads() {
  PoolMemory& memory = context_.memory;
  for (; next_read_ < reads_.size(); ++next_read_) {
    Item& item = items_[reads_[next_read_]];
    if (item.state != State::unissued) continue;
    const std::array<uint8_t*, kPartsMax> present = memory.places(item.record, item.staged);
    if (!memory.stage_missing(item.record, item.staged)) return;
    item.state = State::reading;
    ++reading_;
    context_.loader.start_parts(item.record, memory.places(item.record, item.staged),
                                {present[0] == nullptr, present[1] == nullptr && memory.parts() == kPartsMax});
  }
}

// Nothing is under way, and the next read finds no slots: experts that were asked for, too, hold them until their turn.
// The one whose turn is last gives up its parts and is read as a whole later.
void PooledRequest::make_room() {
  const size_t blocked = next_read_;
  for (size_t i = reads_.size(); i-- > blocked + 1 && next_read_ == blocked;) {
    Item& item = items_[reads_[i]];
    const Residency present = context_.memory.residency(item.record);
    const bool waits_for_its_turn = item.state == State::unissued || item.state == State::ready;
    if (!waits_for_its_turn || present == Residency::miss || present == Residency::full) continue;
    context_.memory.settle(item.record, {}, Residency::miss);
    --by_residency_.at(static_cast<size_t>(present));
    ++by_residency_.at(static_cast<size_t>(Residency::miss));
    item.state = State::unissued;
    issue_reads();
  }
}

void PooledRequest::settle(const LoadOutcome& outcome) {
  const auto found = std::find_if(items_.begin(), items_.end(), [&](const Item& item) {
    return item.record == outcome.record && item.state == State::reading;
  });
  if (found == items_.end()) return;
  --reading_;
  if (outcome.failure) {
    found->staged = {};
    found->state = State::failed;
    if (!failure_) {
      failure_ = outcome.failure;
      failed_record_ = outcome.record;
    }
    return;
  }
  found->state = State::ready;
  ready_.push_back(static_cast<uint32_t>(found - items_.begin()));
}

std::optional<uint32_t> PooledRequest::choose() const {
  if (order_ == HandOutOrder::as_available) return ready_.empty() ? std::nullopt : std::optional(ready_.front());
  return items_[head_].state == State::ready ? std::optional(head_) : std::nullopt;
}

void PooledRequest::decode_into_full_pool(Item& item) {
  std::optional<Slot> slot = context_.memory.acquire_full(item.record);
  if (!slot) return;  // decoded ones that were asked for hold it
  const auto begin = std::chrono::steady_clock::now();
  const std::array<uint8_t*, kPartsMax> parts = context_.memory.places(item.record, item.staged);
  const auto matrices = static_cast<uint32_t>(context_.table[item.record].matrices.size());
  for (uint32_t matrix = 0; matrix < matrices; ++matrix) {
    const MatrixView view = context_.table.view(item.record, matrix, PartPlaces{parts[0], parts[1]});
    uint8_t* weights = slot->data() + context_.table.decoded_offset(item.record, matrix);
    try {
      context_.decoder.decode(view, 0, view.shape.rows, reinterpret_cast<uint16_t*>(weights));
    } catch (const std::runtime_error& error) {
      throw RecordError(RecordFault::invalid_encoding, item.record, error.what());
    }
    decoded_bytes_ += view.shape.rows * view.shape.columns * sizeof(uint16_t);
  }
  context_.memory.settle_full(item.record, std::move(*slot));
  item.staged = {};
  decode_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void PooledRequest::hand_out(uint32_t chosen) {
  Item& item = items_[chosen];
  if (item.destination == Residency::full && context_.memory.residency(item.record) != Residency::full) {
    decode_into_full_pool(item);
  }
  if (order_ == HandOutOrder::as_available) {
    ready_.pop_front();
  } else {
    ++head_;
  }
  item.state = State::handed_out;
  current_ = chosen;
  --left_;
}

void PooledRequest::release_current() {
  if (!current_) return;
  Item& item = items_[*std::exchange(current_, std::nullopt)];
  item.state = State::released;
  const Residency present = context_.memory.residency(item.record);
  const Residency in_memory = present == Residency::full ? present : Residency::both_chunks;
  if (!contains(in_memory, item.destination)) {
    item.destination = Residency::miss;
    context_.dispatch.correct(item.expert, item.destination);
  }
  context_.memory.settle(item.record, std::move(item.staged), item.destination);
}

PartPlaces PooledRequest::current_places() const {
  const Item& item = items_.at(current_.value());
  const std::array<uint8_t*, kPartsMax> parts = context_.memory.places(item.record, item.staged);
  return {parts[0], parts[1]};
}

RequestStep PooledRequest::next(std::chrono::milliseconds timeout) {
  release_current();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (const auto outcome = context_.loader.poll()) settle(*outcome);
  for (;;) {
    if (failure_) throw RecordError(failure_->fault, failed_record_, failure_->message);
    if (left_ == 0) return {RequestStep::Kind::finished};
    issue_reads();
    if (reading_ == 0 && !choose()) make_room();
    if (const std::optional<uint32_t> chosen = choose()) {
      hand_out(*chosen);
      return {RequestStep::Kind::record, items_[*chosen].position};
    }
    const auto now = std::chrono::steady_clock::now();
    const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(deadline - now);
    if (remaining.count() <= 0) return {RequestStep::Kind::waiting};
    const auto outcome = context_.loader.wait(remaining);
    wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - now).count();
    if (outcome) settle(*outcome);
  }
}

}  // namespace zipmoe
