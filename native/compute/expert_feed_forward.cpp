#include "compute/expert_feed_forward.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

#include "compute/row_product.hpp"
#include "compute/row_tasks.hpp"

namespace zipmoe {
namespace {

// A run of rows of one expert's matrix.
struct RowTask {
  uint32_t expert;
  uint64_t row_begin;
  uint64_t row_end;
};

void append_tasks(std::vector<RowTask>& tasks, size_t expert, uint64_t rows, uint64_t rows_per_task) {
  for (uint64_t begin = 0; begin < rows; begin += rows_per_task) {
    tasks.push_back({static_cast<uint32_t>(expert), begin, std::min(begin + rows_per_task, rows)});
  }
}

// Rows per task of the first matrices: whole blocks of the gate's kernel where there is room for one, as a block that
// is not full takes as long as one that is. `share`: matrices that have such a row.
uint64_t activated_rows_per_task(uint64_t group_bytes, uint64_t tokens, uint64_t share) {
  const uint64_t rows = std::min(rows_per_task(group_bytes, tokens), kTaskRowsMax / share);
  return rows < simd::kGateBlock ? rows : rows / simd::kGateBlock * simd::kGateBlock;
}

// One expert of a step: its inputs, and its intermediate vectors, which are the inputs of `down`.
class Work {
 public:
  Work(const ExpertFeedForward& expert, const GatedActivation& activation, ComputeThreads& threads)
      : expert_(expert),
        activation_(activation),
        inputs_(expert.x, expert.tokens, expert.first.matrix.shape().columns, threads),
        intermediate_(expert.tokens, expert.down.matrix.shape().columns, threads.scratch()) {}

  void activate_rows(uint64_t begin, uint64_t end, const simd::GemvKernels& kernels, ScratchPool& scratch) {
    TaskSums first;
    TaskSums second;
    const uint64_t size = intermediate_.columns();
    const bool interleaved = activation_.layout == GateLayout::interleaved && !expert_.up;
    const Rows gate_rows = interleaved ? Rows{2 * begin, 2 * end} : Rows{begin, end};
    const Rows up_rows = expert_.up ? gate_rows : Rows{size + begin, size + end};
    const RowProduct gates(expert_.first.matrix, inputs_, gate_rows.begin, gate_rows.end, kernels, scratch);
    std::optional<RowProduct> ups;
    if (!interleaved && activation_.layout != GateLayout::none) {
      ups.emplace((expert_.up ? *expert_.up : expert_.first).matrix, inputs_, up_rows.begin, up_rows.end, kernels,
                  scratch);
    }
    for_each_turn(inputs_.tokens(), [&](TokenRange tokens) {
      const float* gate = first[0] + multiply(gates, expert_.first, tokens, gate_rows, first);
      if (interleaved) {
        write(tokens, begin, end, kernels.gate, Part{gate, 2}, Part{gate + 1, 2});
      } else if (!ups) {
        write(tokens, begin, end, kernels.gate, Part{gate, 1}, Part{gate, 1});
      } else {
        const float* up = second[0] + multiply(*ups, expert_.up ? *expert_.up : expert_.first, tokens, up_rows, second);
        write(tokens, begin, end, kernels.gate, Part{gate, 1}, Part{up, 1});
      }
    });
  }

  void project_down(uint64_t begin, uint64_t end, const simd::GemvKernels& kernels, ScratchPool& scratch) const {
    gemv_rows(expert_.down, intermediate_, expert_.output, begin, end, kernels, scratch);
  }

 private:
  // Values of consecutive intermediate rows among the sums of a turn's first token.
  struct Part {
    const float* values;
    uint64_t step;
  };

  struct Rows {
    uint64_t begin;
    uint64_t end;
  };

  // Sums with bias; returns the offset of the first row.
  static uint64_t multiply(const RowProduct& product, const Projection& projection, TokenRange tokens, Rows rows,
                           TaskSums& sums) {
    const uint64_t offset = product.multiply(tokens, sums[0], kTaskSumRows);
    for (uint64_t token = 0; token < tokens.count(); ++token) {
      projection.add_bias(rows.begin, rows.end, sums[token] + offset);
    }
    return offset;
  }

  void write(TokenRange tokens, uint64_t begin, uint64_t end, simd::Gate kernel, Part gate, Part up) {
    std::array<float, kTaskRowsMax> gates;
    std::array<float, kTaskRowsMax> ups;
    for (uint64_t token = 0; token < tokens.count(); ++token) {
      const float* gate_values = gate.values + token * kTaskSumRows;
      const float* up_values = up.values + token * kTaskSumRows;
      if (gate.step == 1) {
        activate(tokens.begin + token, begin, end, gate_values, up_values, kernel);
        continue;
      }
      for (uint64_t i = 0; i < end - begin; ++i) {
        gates[i] = gate_values[gate.step * i];
        ups[i] = up_values[up.step * i];
      }
      activate(tokens.begin + token, begin, end, gates.data(), ups.data(), kernel);
    }
  }

  // Intermediate values [begin, end) of a token.
  void activate(uint64_t token, uint64_t begin, uint64_t end, const float* gates, const float* ups, simd::Gate kernel) {
    for (uint64_t done = begin; done < end;) {
      const std::span<uint16_t> piece = intermediate_.piece(token, done);
      const uint64_t count = std::min<uint64_t>(piece.size(), end - done);
      activation_.apply(gates + (done - begin), ups + (done - begin), count, piece.data(), kernel);
      done += count;
    }
  }

  const ExpertFeedForward& expert_;
  const GatedActivation& activation_;
  TokenInputs inputs_;
  TokenInputs intermediate_;
};

void check(const ExpertFeedForward& expert, const GatedActivation& activation) {
  const MatrixShape first = expert.first.matrix.shape();
  const uint64_t intermediate = expert.down.matrix.shape().columns;
  const bool two_in_one = activation.layout != GateLayout::none && !expert.up;
  if (expert.up && activation.layout == GateLayout::none) {
    throw std::invalid_argument("a network without a gate has one matrix before its activation");
  }
  if (first.rows != (two_in_one ? 2 : 1) * intermediate ||
      (expert.up &&
       (expert.up->matrix.shape().rows != intermediate || expert.up->matrix.shape().columns != first.columns))) {
    throw std::invalid_argument("the shapes of an expert's matrices do not fit each other");
  }
}

}  // namespace

void compute_experts(std::span<const ExpertFeedForward> experts, const GatedActivation& activation,
                     ComputeThreads& threads, const simd::GemvKernels& kernels) {
  std::vector<Work> work;
  std::vector<RowTask> first;
  std::vector<RowTask> down;
  work.reserve(experts.size());
  for (const ExpertFeedForward& expert : experts) {
    check(expert, activation);
    // Twice the weights belong to an intermediate row with a gate.
    const uint64_t share = activation.layout == GateLayout::none ? 1 : 2;
    append_tasks(first, work.size(), expert.down.matrix.shape().columns,
                 activated_rows_per_task(share * expert.first.matrix.group_bytes(), expert.tokens, share));
    append_tasks(down, work.size(), expert.down.matrix.shape().rows,
                 rows_per_task(expert.down.matrix.group_bytes(), expert.tokens));
    work.emplace_back(expert, activation, threads);
  }
  threads.run(static_cast<uint32_t>(first.size()), [&](uint32_t task) {
    work[first[task].expert].activate_rows(first[task].row_begin, first[task].row_end, kernels, threads.scratch());
  });
  threads.run(static_cast<uint32_t>(down.size()), [&](uint32_t task) {
    work[down[task].expert].project_down(down[task].row_begin, down[task].row_end, kernels, threads.scratch());
  });
}

}  // namespace zipmoe
