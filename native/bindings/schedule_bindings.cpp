// Python face of the scheduler. Durations are seconds here and whole picoseconds inside.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/module.hpp"
#include "schedule/scheduler.hpp"
#include "schedule/simulation.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

using Seconds = std::vector<double>;
using States = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SecondsArray = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SpanTuple = std::pair<double, double>;

struct LayerSchedule {
  TaskOrder order;
  Timeline timeline;
  Picoseconds bound;
  std::vector<int32_t> block_of_task;  // -1: nothing left to do
};

ChunkLayout layout_of(uint32_t shards) { return shards == 0 ? ChunkLayout::fused() : ChunkLayout::separable(shards); }

const char* operation_name(OperationKind kind) {
  switch (kind) {
    case OperationKind::read_exponent:
      return "E";
    case OperationKind::read_sign_mantissa:
      return "SM";
    case OperationKind::read_packed:
      return "packed";
    case OperationKind::decompress:
      return "decompress";
    case OperationKind::recombine:
      return "recombine";
    case OperationKind::execute:
      return "execute";
  }
  throw std::logic_error("an operation without a name");
}

void require_length(const char* name, size_t length, size_t expected) {
  if (length == expected) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(length) + " values, expected " +
                              std::to_string(expected));
}

TaskCosts costs_of(double read_sign_mantissa, double read_shard, double decompress, double recombine) {
  return {to_picoseconds(read_sign_mantissa), to_picoseconds(read_shard), to_picoseconds(decompress),
          to_picoseconds(recombine)};
}

std::vector<Picoseconds> durations_of(const double* seconds, size_t count) {
  std::vector<Picoseconds> durations(count);
  std::transform(seconds, seconds + count, durations.begin(), [](double s) { return to_picoseconds(s); });
  return durations;
}

LayerSchedule schedule_layer(const std::vector<int64_t>& expert, const std::vector<int64_t>& tensor,
                             const std::vector<int64_t>& state, const Seconds& read_sign_mantissa,
                             const Seconds& read_shard, const Seconds& decompress, const Seconds& recombine,
                             const Seconds& execute, uint32_t shards, uint32_t workers, const std::string& order) {
  const size_t count = expert.size();
  require_length("tensor", tensor.size(), count);
  require_length("state", state.size(), count);
  require_length("read_sign_mantissa_seconds", read_sign_mantissa.size(), count);
  require_length("read_shard_seconds", read_shard.size(), count);
  require_length("decompress_seconds", decompress.size(), count);
  require_length("recombine_seconds", recombine.size(), count);
  std::vector<int64_t> ids(expert);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  require_length("execute_seconds", execute.size(), ids.size());

  std::vector<Task> tasks;
  tasks.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (tensor[i] < 0 || tensor[i] > UINT32_MAX) throw std::invalid_argument("a tensor's id must not be negative");
    const auto position = std::lower_bound(ids.begin(), ids.end(), expert[i]) - ids.begin();
    tasks.push_back({static_cast<uint32_t>(position), static_cast<uint32_t>(tensor[i]), parse_residency(state[i]),
                     costs_of(read_sign_mantissa[i], read_shard[i], decompress[i], recombine[i])});
  }
  const Layer layer(std::move(tasks), durations_of(execute.data(), execute.size()), layout_of(shards), workers);
  LayerSchedule schedule;
  schedule.order = task_order(layer, parse_order_kind(order));
  schedule.timeline = simulate(layer, schedule.order);
  schedule.bound = lower_bound(layer);
  schedule.block_of_task.assign(count, -1);
  uint32_t position = 0;
  for (size_t block = 0; block < schedule.order.block_ends.size(); ++block) {
    for (; position < schedule.order.block_ends[block]; ++position) {
      schedule.block_of_task[schedule.order.tasks[position]] = static_cast<int32_t>(block);
    }
  }
  return schedule;
}

double layer_makespan(const States& states, uint32_t tensors, const Seconds& read_sign_mantissa,
                      const Seconds& read_shard, const Seconds& decompress, const Seconds& recombine,
                      const SecondsArray& execute, uint32_t shards, uint32_t workers, const std::string& order) {
  if (tensors == 0) throw std::invalid_argument("an expert has at least one tensor");
  require_length("read_sign_mantissa_seconds", read_sign_mantissa.size(), tensors);
  require_length("read_shard_seconds", read_shard.size(), tensors);
  require_length("decompress_seconds", decompress.size(), tensors);
  require_length("recombine_seconds", recombine.size(), tensors);
  require_length("execute_seconds", execute.size(), states.size());
  std::vector<TaskCosts> costs;
  for (uint32_t tensor = 0; tensor < tensors; ++tensor) {
    costs.push_back(costs_of(read_sign_mantissa[tensor], read_shard[tensor], decompress[tensor], recombine[tensor]));
  }
  std::vector<Task> tasks;
  tasks.reserve(states.size() * tensors);
  for (uint32_t expert = 0; expert < states.size(); ++expert) {
    const Residency residency = parse_residency(states.data()[expert]);
    for (uint32_t tensor = 0; tensor < tensors; ++tensor) tasks.push_back({expert, tensor, residency, costs[tensor]});
  }
  const Layer layer(std::move(tasks), durations_of(execute.data(), execute.size()), layout_of(shards), workers);
  return to_seconds(makespan(layer, task_order(layer, parse_order_kind(order))));
}

SpanTuple seconds_of(const TimeSpan& span) { return {to_seconds(span.start), to_seconds(span.end)}; }

}  // namespace

void bind_schedule(nb::module_& module) {
  nb::class_<LayerSchedule>(module, "LayerSchedule")
      .def_prop_ro("io",
                   [](const LayerSchedule& self) {
                     std::vector<std::tuple<uint32_t, std::string, uint32_t>> reads;
                     for (const Read& read : self.timeline.reads) {
                       reads.emplace_back(read.task, operation_name(read.kind), read.shard);
                     }
                     return reads;
                   })
      .def_prop_ro("io_times",
                   [](const LayerSchedule& self) {
                     std::vector<SpanTuple> times;
                     for (const Read& read : self.timeline.reads) times.push_back(seconds_of(read.time));
                     return times;
                   })
      .def_prop_ro("decompressions",
                   [](const LayerSchedule& self) {
                     std::vector<std::pair<uint32_t, uint32_t>> shards;
                     for (const Decompression& job : self.timeline.decompressions) {
                       shards.emplace_back(job.task, job.shard);
                     }
                     return shards;
                   })
      .def_prop_ro("decompression_times",
                   [](const LayerSchedule& self) {
                     std::vector<std::tuple<uint32_t, double, double>> times;
                     for (const Decompression& job : self.timeline.decompressions) {
                       times.emplace_back(job.worker, to_seconds(job.time.start), to_seconds(job.time.end));
                     }
                     return times;
                   })
      .def_prop_ro("recombination_times",
                   [](const LayerSchedule& self) {
                     std::vector<SpanTuple> times;
                     for (const TimeSpan& span : self.timeline.recombinations) times.push_back(seconds_of(span));
                     return times;
                   })
      .def_prop_ro("execution_times",
                   [](const LayerSchedule& self) {
                     std::vector<SpanTuple> times;
                     for (const TimeSpan& span : self.timeline.executions) times.push_back(seconds_of(span));
                     return times;
                   })
      .def_prop_ro("execution_end",
                   [](const LayerSchedule& self) {
                     Seconds ends;
                     for (const TimeSpan& span : self.timeline.executions) ends.push_back(to_seconds(span.end));
                     return ends;
                   })
      .def_ro("block_of_task", &LayerSchedule::block_of_task)
      .def_prop_ro("task_order", [](const LayerSchedule& self) { return self.order.tasks; })
      .def_prop_ro("makespan", [](const LayerSchedule& self) { return to_seconds(self.timeline.makespan); })
      .def_prop_ro("io_end", [](const LayerSchedule& self) { return to_seconds(self.timeline.io_end); })
      .def_prop_ro("io_seconds",
                   [](const LayerSchedule& self) {
                     Picoseconds total = 0;
                     for (const Read& read : self.timeline.reads) total += read.time.end - read.time.start;
                     return to_seconds(total);
                   })
      .def_prop_ro("lower_bound", [](const LayerSchedule& self) { return to_seconds(self.bound); });

  module.def("schedule_layer", &schedule_layer, "expert"_a, "tensor"_a, "state"_a, "read_sign_mantissa_seconds"_a,
             "read_shard_seconds"_a, "decompress_seconds"_a, "recombine_seconds"_a, "execute_seconds"_a, "shards"_a,
             "workers"_a, "order"_a = "cache_affinity");
  module.def("layer_makespan", &layer_makespan, "states"_a, "tensors"_a, "read_sign_mantissa_seconds"_a,
             "read_shard_seconds"_a, "decompress_seconds"_a, "recombine_seconds"_a, "execute_seconds"_a, "shards"_a,
             "workers"_a, "order"_a = "cache_affinity");
  module.def(
      "reconstruction_dag",
      [](int64_t state, uint32_t shards) {
        std::vector<std::tuple<std::string, uint32_t, std::vector<uint32_t>>> operations;
        for (const Operation& operation : reconstruction_dag(parse_residency(state), layout_of(shards))) {
          operations.emplace_back(operation_name(operation.kind), operation.shard, operation.predecessors);
        }
        return operations;
      },
      "state"_a, "shards"_a);
}

}  // namespace zipmoe
