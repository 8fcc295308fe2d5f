#include "schedule/residency.hpp"

#include <stdexcept>
#include <string>

namespace zipmoe {

Residency parse_residency(int64_t code) {
  if (code < 0 || code > static_cast<int64_t>(Residency::miss)) {
    throw std::invalid_argument("a state is 0 (F), 1 (C), 2 (S), 3 (E) or 4 (M), not " + std::to_string(code));
  }
  return static_cast<Residency>(code);
}

ChunkLayout ChunkLayout::separable(uint32_t shards) {
  if (shards == 0) throw std::invalid_argument("an E-chunk has at least one shard");
  return ChunkLayout(shards);
}

RemainingWork remaining_work(Residency residency, const ChunkLayout& layout) {
  if (residency == Residency::full) return {};
  if (layout.is_fused()) return {.read_sign_mantissa = residency == Residency::miss};
  return {.read_exponent = !holds_exponent(residency),
          .decompress = true,
          .read_sign_mantissa = !holds_sign_mantissa(residency),
          .recombine = true};
}

std::vector<Operation> reconstruction_dag(Residency residency, const ChunkLayout& layout) {
  if (!layout.can_hold(residency)) {
    throw std::invalid_argument("a fused codec's record has no chunks that could be held apart (states S and E)");
  }
  const RemainingWork work = remaining_work(residency, layout);
  std::vector<Operation> operations;
  const auto add = [&operations](OperationKind kind, uint32_t shard, std::vector<uint32_t> predecessors) {
    operations.push_back({kind, shard, std::move(predecessors)});
    return static_cast<uint32_t>(operations.size() - 1);
  };
  std::vector<uint32_t> parts;  // the operations that complete the tensor's parts
  if (work.decompress) {
    for (uint32_t shard = 0; shard < layout.shards(); ++shard) {
      std::vector<uint32_t> read;
      if (work.read_exponent) read.push_back(add(OperationKind::read_exponent, shard, {}));
      parts.push_back(add(OperationKind::decompress, shard, std::move(read)));
    }
  }
  if (work.read_sign_mantissa) {
    const OperationKind kind = layout.is_fused() ? OperationKind::read_packed : OperationKind::read_sign_mantissa;
    parts.push_back(add(kind, 0, {}));
  }
  if (work.recombine) parts = {add(OperationKind::recombine, 0, std::move(parts))};
  add(OperationKind::execute, 0, std::move(parts));
  return operations;
}

}  // namespace zipmoe
