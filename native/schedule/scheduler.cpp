#include "schedule/scheduler.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "schedule/block.hpp"

namespace zipmoe {

OrderKind parse_order_kind(std::string_view name) {
  if (name == "cache_affinity") return OrderKind::cache_affinity;
  if (name == "fifo") return OrderKind::fifo;
  throw std::invalid_argument("the order must be cache_affinity or fifo, not " + std::string(name));
}

TaskOrder cache_affinity_order(const Layer& layer) {
  std::vector<uint32_t> type_one;
  std::vector<uint32_t> type_two;
  for (uint32_t task = 0; task < layer.tasks().size(); ++task) {
    const RemainingWork& work = layer.work()[task];
    if (work.read_sign_mantissa) {
      type_one.push_back(task);
    } else if (work.any()) {
      type_two.push_back(task);
    }
  }
  const auto order_of = [&layer](uint32_t a, uint32_t b) { return precedes(layer, a, b); };
  std::sort(type_one.begin(), type_one.end(), order_of);
  std::sort(type_two.begin(), type_two.end(), order_of);

  TaskOrder order;
  order.tasks.reserve(type_one.size() + type_two.size());
  size_t next = 0;  // of type_two
  for (const uint32_t base : type_one) {
    if (next == type_two.size()) {
      order.tasks.push_back(base);
    } else {
      Block block(layer, base);
      while (next < type_two.size() && !block.compute_bound()) block.insert(type_two[next++]);
      order.tasks.insert(order.tasks.end(), block.order().begin(), block.order().end());
    }
    order.block_ends.push_back(static_cast<uint32_t>(order.tasks.size()));
  }
  if (next < type_two.size()) {
    order.tasks.insert(order.tasks.end(), type_two.begin() + static_cast<std::ptrdiff_t>(next), type_two.end());
    order.block_ends.push_back(static_cast<uint32_t>(order.tasks.size()));
  }
  return order;
}

TaskOrder fifo_order(const Layer& layer) {
  TaskOrder order;
  for (uint32_t task = 0; task < layer.tasks().size(); ++task) {
    if (layer.work()[task].any()) order.tasks.push_back(task);
  }
  std::sort(order.tasks.begin(), order.tasks.end(), [&layer](uint32_t a, uint32_t b) {
    const Task& left = layer.tasks()[a];
    const Task& right = layer.tasks()[b];
    return left.expert != right.expert ? left.expert < right.expert : left.tensor < right.tensor;
  });
  for (uint32_t end = 1; end <= order.tasks.size(); ++end) order.block_ends.push_back(end);
  return order;
}

TaskOrder task_order(const Layer& layer, OrderKind kind) {
  return kind == OrderKind::fifo ? fifo_order(layer) : cache_affinity_order(layer);
}

}  // namespace zipmoe
