// The orders in which a layer's work can be done. Pure functions: the same input gives the same output.
#pragma once

#include <string_view>

#include "schedule/layer.hpp"

namespace zipmoe {

enum class OrderKind : uint8_t { cache_affinity, fifo };

// "cache_affinity" or "fifo"; throws std::invalid_argument otherwise.
OrderKind parse_order_kind(std::string_view name);

// The paper's scheduler (docs/scheduling.md): blocks of one task that must read its SM-chunk and of tasks that need
// not, which keep the workers busy meanwhile.
TaskOrder cache_affinity_order(const Layer& layer);
// For comparison: tasks in ascending order of expert and tensor, each read as a whole before the next.
TaskOrder fifo_order(const Layer& layer);
TaskOrder task_order(const Layer& layer, OrderKind kind);

}  // namespace zipmoe
