#include "runtime/layer_order.hpp"

#include <algorithm>
#include <utility>

namespace zipmoe {
namespace {

// Executions enter the order only by comparison with each other, so any unit serves.
constexpr Picoseconds kExecutionPerToken = 1'000'000;
constexpr double kSecondsMax = 10;  // keeps absurd rates within what a schedule can represent

Picoseconds duration(double bytes, double bytes_per_second) {
  return to_picoseconds(std::min(bytes / bytes_per_second, kSecondsMax));
}

TaskCosts mean_costs(std::span<const ExpertWork> experts, uint32_t shards, uint32_t workers, const ReadRates& rates) {
  double exponent_bytes = 0;
  double sign_mantissa_bytes = 0;
  double weights = 0;
  double tensors = 0;
  for (const ExpertWork& expert : experts) {
    for (const TensorWork& tensor : expert.tensors) {
      exponent_bytes += static_cast<double>(tensor.exponent_bytes);
      sign_mantissa_bytes += static_cast<double>(tensor.sign_mantissa_bytes);
      weights += static_cast<double>(tensor.weights);
      tensors += 1;
    }
  }
  return {.read_sign_mantissa = duration(sign_mantissa_bytes / tensors, rates.read_bytes_per_second),
          .read_shard = duration(exponent_bytes / tensors / shards, rates.read_bytes_per_second),
          .decompress_shard = duration(2 * weights / tensors * workers / shards, rates.decode_bytes_per_second),
          .recombine = 0};
}

void append_shards(LayerOrder& order, std::span<const ExpertWork> experts, uint32_t expert, uint32_t tensor) {
  const uint32_t shards = experts[expert].tensors[tensor].shards;
  for (uint32_t shard = 0; shard < shards; ++shard) order.decompressions.push_back({expert, tensor, shard});
}

}  // namespace

LayerOrder layer_order(std::span<const ExpertWork> experts, const ChunkLayout& layout, uint32_t workers,
                       const ReadRates& rates, OrderKind kind) {
  LayerOrder result;
  if (experts.empty()) return result;
  const TaskCosts costs = mean_costs(experts, std::max(layout.shards(), 1U), workers, rates);
  std::vector<Task> tasks;
  std::vector<Picoseconds> execute;
  for (uint32_t i = 0; i < experts.size(); ++i) {
    for (uint32_t tensor = 0; tensor < experts[i].tensors.size(); ++tensor) {
      tasks.push_back({.expert = i, .tensor = tensor, .residency = experts[i].residency, .costs = costs});
    }
    execute.push_back(kExecutionPerToken * experts[i].tokens);
  }
  const Layer layer(std::move(tasks), std::move(execute), layout, workers);
  const TaskOrder order = task_order(layer, kind);

  // Extents in the order of the file; the one of a codec without parts is its first.
  const uint32_t last_part = layout.is_fused() ? 0 : 1;
  std::vector<std::array<bool, 2>> listed(experts.size());
  const auto list = [&](uint32_t task, uint32_t part) {
    const uint32_t expert = layer.tasks()[task].expert;
    if (std::exchange(listed[expert][part], true)) return;
    if (result.reads.empty() || result.reads.back().expert != expert) result.reads.push_back({expert, {false, false}});
    result.reads.back().parts[part] = true;
  };
  size_t begin = 0;
  for (const uint32_t end : order.block_ends) {
    for (size_t i = begin; i < end; ++i) {
      if (layer.work()[order.tasks[i]].read_exponent) list(order.tasks[i], 0);
    }
    for (size_t i = begin; i < end; ++i) {
      if (layer.work()[order.tasks[i]].read_sign_mantissa) list(order.tasks[i], last_part);
    }
    begin = end;
  }
  for (const uint32_t task : order.tasks) {
    const Task& entry = layer.tasks()[task];
    if (layer.work()[task].decompress) append_shards(result, experts, entry.expert, entry.tensor);
  }
  return result;
}

LayerOrder ascending_order(std::span<const ExpertWork> experts, const ChunkLayout& layout) {
  LayerOrder result;
  for (uint32_t i = 0; i < experts.size(); ++i) {
    if (experts[i].residency != Residency::full) result.reads.push_back({i, {true, !layout.is_fused()}});
    if (!remaining_work(experts[i].residency, layout).decompress) continue;
    for (uint32_t tensor = 0; tensor < experts[i].tensors.size(); ++tensor) append_shards(result, experts, i, tensor);
  }
  return result;
}

}  // namespace zipmoe
