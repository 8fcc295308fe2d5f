#include "runtime/read_order.hpp"

#include <algorithm>

namespace zipmoe {
namespace {

// Executions enter the order only by comparison with each other, so any unit serves.
constexpr Picoseconds kExecutionPerToken = 1'000'000;
constexpr double kSecondsMax = 1e4;  // keeps absurd rates within what a schedule can represent

Picoseconds duration(double bytes, double bytes_per_second) {
  return to_picoseconds(std::min(bytes / bytes_per_second, kSecondsMax));
}

}  // namespace

std::vector<uint32_t> order_of_reads(std::span<const ReadDemand> experts, const ChunkLayout& layout, uint32_t workers,
                                     const ReadRates& rates, OrderKind kind) {
  std::vector<uint32_t> waiting;
  for (uint32_t i = 0; i < experts.size(); ++i) {
    const RemainingWork work = remaining_work(experts[i].residency, layout);
    if (work.read_exponent || work.read_sign_mantissa) waiting.push_back(i);
  }
  if (waiting.size() < 2) return waiting;
  const uint32_t shards = std::max(layout.shards(), 1U);
  std::vector<Task> tasks;
  std::vector<Picoseconds> execute;
  for (uint32_t i = 0; i < experts.size(); ++i) {
    const ReadDemand& expert = experts[i];
    const double decode_bytes = 2.0 * static_cast<double>(expert.weights) * workers / shards;
    tasks.push_back({.expert = i,
                     .tensor = 0,
                     .residency = expert.residency,
                     .costs = {.read_sign_mantissa = duration(static_cast<double>(expert.sign_mantissa_bytes),
                                                              rates.read_bytes_per_second),
                               .read_shard = duration(static_cast<double>(expert.exponent_bytes) / shards,
                                                      rates.read_bytes_per_second),
                               .decompress_shard = duration(decode_bytes, rates.decode_bytes_per_second),
                               .recombine = 0}});
    execute.push_back(kExecutionPerToken * expert.tokens);
  }
  const Layer layer(std::move(tasks), std::move(execute), layout, workers);
  const TaskOrder order = task_order(layer, kind);
  std::vector<uint32_t> reads;
  std::vector<bool> listed(experts.size());
  const auto list = [&](uint32_t task) {
    const uint32_t expert = layer.tasks()[task].expert;
    if (!listed[expert]) reads.push_back(expert);
    listed[expert] = true;
  };
  size_t begin = 0;
  for (const uint32_t end : order.block_ends) {
    for (size_t i = begin; i < end; ++i) {
      if (layer.work()[order.tasks[i]].read_exponent) list(order.tasks[i]);
    }
    for (size_t i = begin; i < end; ++i) {
      if (layer.work()[order.tasks[i]].read_sign_mantissa) list(order.tasks[i]);
    }
    begin = end;
  }
  return reads;
}

}  // namespace zipmoe
