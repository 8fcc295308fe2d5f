#include "runtime/pooled_request.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "runtime/full_demotion.hpp"

namespace zipmoe {
namespace {

bool executable(Residency residency) { return residency <= Residency::both_chunks; }

// Decodes rows of a matrix of which some shards may have been decompressed. Returns how many rows these had. `matrix`
// is named by its expert and tensor.
uint64_t decode_claimed(DecompressAhead& ahead, RowDecoder& decoder, const MatrixView& view, const ShardTask& matrix,
                        RowRange rows, uint16_t* out) {
  const uint64_t shards = view.shard_bytes.size();
  const auto first = static_cast<uint32_t>(shard_of_row(view.shape.rows, shards, rows.begin));
  const auto end = static_cast<uint32_t>(shard_of_row(view.shape.rows, shards, rows.end - 1) + 1);
  struct Demand {
    DecompressAhead& ahead;
    ~Demand() { ahead.release(); }
  };
  const Demand demand{ahead};
  const DecompressAhead::Claim claim = ahead.claim(matrix.expert, matrix.tensor, first, end);
  PreparedExponents prepared{.exponents = claim.exponents, .shard_begin = first, .shards = {}, .await = {}};
  uint64_t ready = 0;
  bool all_absent = true;
  for (uint32_t i = 0; i < claim.shards.size(); ++i) {
    using Shard = PreparedExponents::Shard;
    const DecompressAhead::ShardState state = claim.shards[i];
    const bool absent = state == DecompressAhead::ShardState::claimed;
    all_absent = all_absent && absent;
    prepared.shards.push_back(absent                                       ? Shard::absent
                              : state == DecompressAhead::ShardState::done ? Shard::ready
                                                                           : Shard::coming);
    if (prepared.shards.back() != Shard::ready) continue;
    const RowRange all = shard_rows(view.shape.rows, shards, first + i);
    ready += std::min(all.end, rows.end) - std::min(std::max(all.begin, rows.begin), std::min(all.end, rows.end));
  }
  if (all_absent) {
    decoder.decode(view, rows.begin, rows.end, out);
    return 0;
  }
  prepared.await = [&](uint32_t shard) { ahead.await(matrix.expert, matrix.tensor, shard); };
  decoder.decode(view, prepared, rows.begin, rows.end, out);
  return ready;
}

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
  } else {
    // First those in F: they make room there for others, whatever has been decompressed by when.
    for (const bool full : {true, false}) {
      for (uint32_t i = 0; i < items_.size(); ++i) {
        const bool in_full = memory.residency(items_[i].record) == Residency::full;
        if (items_[i].state == State::ready && in_full == full) ready_.push_back(i);
      }
    }
  }
  LayerOrder order_of_all = order_of_work();
  reads_ = std::move(order_of_all.reads);
  start_decompressing(std::move(order_of_all.decompressions));
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
  if (context_.ahead != nullptr) context_.ahead->end();
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

LayerOrder PooledRequest::order_of_work() const {
  std::vector<uint32_t> ascending(items_.size());
  std::iota(ascending.begin(), ascending.end(), 0U);
  std::sort(ascending.begin(), ascending.end(),
            [&](uint32_t a, uint32_t b) { return items_[a].expert < items_[b].expert; });
  const bool separable = context_.memory.parts() == kPartsMax;
  std::vector<ExpertWork> experts;
  uint32_t shards = 1;
  for (const uint32_t i : ascending) {
    ExpertWork& work = experts.emplace_back();
    work.residency = context_.memory.residency(items_[i].record);
    work.tokens = items_[i].tokens;
    for (const RecordMatrix& matrix : context_.table[items_[i].record].matrices) {
      const auto matrix_shards = static_cast<uint32_t>(matrix.shard_bytes.size());
      shards = std::max(shards, matrix_shards);
      work.tensors.push_back({.exponent_bytes = separable ? matrix.sections[0].length : 0,
                              .sign_mantissa_bytes = matrix.sections[separable ? 1 : 0].length,
                              .weights = matrix.shape.rows * matrix.shape.columns,
                              .shards = matrix_shards});
    }
  }
  const ChunkLayout layout = separable ? ChunkLayout::separable(shards) : ChunkLayout::fused();
  // With ascending hand-out reads are ascending, too: whoever holds staging slots is handed out before whoever waits
  // for them.
  LayerOrder order = order_ == HandOutOrder::ascending
                         ? ascending_order(experts, layout)
                         : layer_order(experts, layout, context_.workers, context_.rates, context_.read_order);
  for (PartRead& read : order.reads) read.expert = ascending[read.expert];
  for (ShardTask& task : order.decompressions) task.expert = ascending[task.expert];
  return order;
}

void PooledRequest::start_decompressing(std::vector<ShardTask> priority) {
  if (context_.ahead == nullptr) return;
  std::vector<RecordIndex> records;
  for (const Item& item : items_) records.push_back(item.record);
  const uint32_t group = context_.memory.expert(records.front()).group;
  context_.ahead->begin(std::move(records), std::move(priority), context_.memory.exponent_buffers(group));
  for (uint32_t i = 0; i < items_.size(); ++i) {
    const uint8_t* exponent_part = context_.memory.places(items_[i].record, {})[0];
    if (exponent_part != nullptr) context_.ahead->expect(i, exponent_part, true);
  }
}

// False: the read must wait, because there are too few free slots. Then nobody else gets any (`blocked`), but experts
// that hold theirs are read to the end.
bool PooledRequest::start_read(const PartRead& read, bool& blocked) {
  PoolMemory& memory = context_.memory;
  Item& item = items_[read.expert];
  if (item.state == State::ready) return !blocked;  // may yet have to give its parts up
  if (item.state == State::unissued) {
    if (blocked) return false;
    const std::array<uint8_t*, kPartsMax> present = memory.places(item.record, item.staged);
    if (!memory.stage_missing(item.record, item.staged)) {
      blocked = true;
      return false;
    }
    item.state = State::reading;
    for (uint32_t part = 0; part < memory.parts(); ++part) item.left[part] = present[part] == nullptr;
  }
  if (item.state != State::reading) return true;
  const std::array<bool, kPartsMax> missing = {read.parts[0] && item.left[0], read.parts[1] && item.left[1]};
  if (!missing[0] && !missing[1]) return true;
  const std::array<uint8_t*, kPartsMax> places = memory.places(item.record, item.staged);
  if (context_.ahead != nullptr && missing[0]) context_.ahead->expect(read.expert, places[0], false);
  ++item.under_way;
  ++reading_;
  context_.loader.start_parts(item.record, places, missing);
  return true;
}

void PooledRequest::issue_reads() {
  bool blocked = false;
  size_t kept = 0;
  for (size_t i = 0; i < reads_.size(); ++i) {
    if (!start_read(reads_[i], blocked)) reads_[kept++] = reads_[i];
  }
  reads_.resize(kept);
}

// Nothing is under way, and the next read finds no slots: experts that were asked for, too, hold them until their turn.
// The one whose turn is last gives up its parts and is read as a whole later.
void PooledRequest::make_room() {
  if (reads_.empty()) return;
  const Item& blocked = items_[reads_.front().expert];
  const std::vector<PartRead> waiting = reads_;
  for (size_t i = waiting.size(); i-- > 1 && blocked.state == State::unissued;) {
    Item& item = items_[waiting[i].expert];
    const Residency present = context_.memory.residency(item.record);
    const bool waits_for_its_turn = item.state == State::unissued || item.state == State::ready;
    if (&item == &blocked || !waits_for_its_turn || present == Residency::miss || present == Residency::full) continue;
    withdraw(item);
    context_.memory.settle(item.record, {}, Residency::miss);
    --by_residency_.at(static_cast<size_t>(present));
    ++by_residency_.at(static_cast<size_t>(Residency::miss));
    item.state = State::unissued;
    for (PartRead& read : reads_) {
      if (read.expert == waiting[i].expert) read.parts = {true, context_.memory.parts() == kPartsMax};
    }
    issue_reads();
  }
}

void PooledRequest::settle(const LoadOutcome& outcome) {
  const auto found = std::find_if(items_.begin(), items_.end(), [&](const Item& item) {
    return item.record == outcome.record && item.under_way > 0;
  });
  if (found == items_.end()) return;
  --reading_;
  --found->under_way;
  if (outcome.failure) {
    found->state = State::failed;
    if (!failure_) {
      failure_ = outcome.failure;
      failed_record_ = outcome.record;
    }
  }
  for (uint32_t part = 0; part < kPartsMax; ++part) found->left[part] = found->left[part] && !outcome.parts[part];
  if (found->state == State::failed) {
    if (found->under_way > 0) return;  // its other part is still being written
    withdraw(*found);
    found->staged = {};
  } else if (!found->left[0] && !found->left[1]) {
    found->state = State::ready;
    ready_.push_back(static_cast<uint32_t>(found - items_.begin()));
  }
}

void PooledRequest::withdraw(const Item& item) {
  if (context_.ahead != nullptr) context_.ahead->withdraw(static_cast<uint32_t>(&item - items_.data()));
}

std::optional<uint32_t> PooledRequest::choose() const {
  if (order_ == HandOutOrder::ascending) {
    return items_[head_].state == State::ready ? std::optional(head_) : std::nullopt;
  }
  if (ready_.empty()) return std::nullopt;
  if (context_.ahead != nullptr) {
    for (const uint32_t i : ready_) {
      if (context_.ahead->complete(i)) return i;
    }
  }
  return ready_.front();
}

void PooledRequest::decode(uint32_t matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out) {
  decode_rows(current_.value(), matrix, row_begin, row_end, out);
}

void PooledRequest::decode_rows(uint32_t index, uint32_t matrix, uint64_t row_begin, uint64_t row_end, uint16_t* out) {
  const Item& item = items_[index];
  const auto begin = std::chrono::steady_clock::now();
  const std::array<uint8_t*, kPartsMax> parts = context_.memory.places(item.record, item.staged);
  const MatrixView view = context_.table.view(item.record, matrix, PartPlaces{parts[0], parts[1]});
  const uint64_t row_bytes = view.shape.columns * sizeof(uint16_t);
  try {
    if (context_.ahead == nullptr || row_begin >= row_end) {
      context_.decoder.decode(view, row_begin, row_end, out);
    } else {
      ready_bytes_ += row_bytes * decode_claimed(*context_.ahead, context_.decoder, view, {index, matrix, 0},
                                                 {row_begin, row_end}, out);
    }
  } catch (const std::runtime_error& error) {
    throw RecordError(RecordFault::invalid_encoding, item.record, error.what());
  }
  decoded_bytes_ += row_bytes * (row_end - row_begin);
  decode_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void PooledRequest::decode_into_full_pool(uint32_t index) {
  Item& item = items_[index];
  std::optional<Slot> slot = context_.memory.acquire_full(item.record);
  if (!slot) return;  // decoded ones that were asked for hold it
  const auto matrices = static_cast<uint32_t>(context_.table[item.record].matrices.size());
  for (uint32_t matrix = 0; matrix < matrices; ++matrix) {
    uint8_t* weights = slot->data() + context_.table.decoded_offset(item.record, matrix);
    const uint64_t rows = context_.table[item.record].matrices[matrix].shape.rows;
    decode_rows(index, matrix, 0, rows, reinterpret_cast<uint16_t*>(weights));
  }
  withdraw(item);
  context_.memory.settle_full(item.record, std::move(*slot));
  item.staged = {};
}

void PooledRequest::hand_out(uint32_t chosen) {
  Item& item = items_[chosen];
  if (item.destination == Residency::full && context_.memory.residency(item.record) != Residency::full) {
    decode_into_full_pool(chosen);
  }
  if (order_ == HandOutOrder::as_available) {
    std::erase(ready_, chosen);
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
  withdraw(item);
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
  for (;;) {
    while (const auto outcome = context_.loader.poll()) settle(*outcome);
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
    // Waiting for a read, this thread decompresses what is there.
    const bool helped = context_.ahead != nullptr && context_.ahead->help();
    const auto outcome = helped ? std::nullopt : context_.loader.wait(remaining);
    wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - now).count();
    if (outcome) settle(*outcome);
  }
}

}  // namespace zipmoe
