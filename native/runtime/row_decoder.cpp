#include "runtime/row_decoder.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "codec/planar.hpp"
#include "simd/kernels.hpp"

namespace zipmoe {
namespace {

// Waking a worker costs some microseconds; this much output keeps it busy for longer than that.
constexpr uint64_t kSmallestTaskWeights = uint64_t{128} << 10;
// More tasks than threads, because other processes and the reader's threads take cores away at times.
constexpr uint64_t kTasksPerThread = 4;

// Units of at most this many rows (FX3: 4) are cheap enough to decode row by row.
constexpr uint64_t kRowsDecodedAlone = 64;
// Largest temporary buffer of one thread when several rows are looked up in one unit: 16 MiB of BF16.
constexpr uint64_t kBatchWeights = uint64_t{8} << 20;

uint64_t divide_up(uint64_t value, uint64_t divisor) { return (value + divisor - 1) / divisor; }

// Row numbers at which tasks begin, and the end: cuts that the codec can make without repeating work.
std::vector<uint64_t> cut_rows(const Codec& codec, const MatrixView& view, uint64_t row_begin, uint64_t row_end,
                               uint64_t threads) {
  std::vector<uint64_t> cuts{row_begin};
  const uint64_t rows = row_end - row_begin;
  const uint64_t tasks =
      threads == 1 ? 1
                   : std::min(threads * kTasksPerThread, divide_up(rows * view.shape.columns, kSmallestTaskWeights));
  const uint64_t rows_per_task = divide_up(rows, tasks);
  for (uint64_t wanted = row_begin + rows_per_task; wanted < row_end; wanted = cuts.back() + rows_per_task) {
    const RowRange unit = codec.split_at(view, wanted);
    const uint64_t cut = unit.begin > cuts.back() ? unit.begin : unit.end;
    if (cut >= row_end) break;
    cuts.push_back(cut);
  }
  cuts.push_back(row_end);
  return cuts;
}

}  // namespace

std::vector<uint32_t> ascending_order(std::span<const int64_t> rows) {
  std::vector<uint32_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return rows[a] < rows[b]; });
  return order;
}

void RowDecoder::decode(const MatrixView& view, uint64_t row_begin, uint64_t row_end, uint16_t* out) {
  if (row_begin >= row_end) return;
  const std::vector<uint64_t> cuts = cut_rows(codec_, view, row_begin, row_end, workers_.threads());
  workers_.run(static_cast<uint32_t>(cuts.size() - 1), [&](uint32_t task) {
    codec_.decode_rows(view, cuts[task], cuts[task + 1], out + (cuts[task] - row_begin) * view.shape.columns,
                       instruction_set_);
  });
}

void RowDecoder::decode(const MatrixView& view, const PreparedExponents& prepared, uint64_t row_begin, uint64_t row_end,
                        uint16_t* out) {
  using Shard = PreparedExponents::Shard;
  const auto [rows, columns] = view.shape;
  if (view.sections[1].size() != rows * columns) throw FormatError("the SM section has not the bytes of its matrix");
  struct Piece {
    Shard kind;
    uint32_t shard;
    RowRange rows;
  };
  std::vector<Piece> pieces;
  for (uint32_t i = 0; i < prepared.shards.size(); ++i) {
    const uint32_t shard = prepared.shard_begin + i;
    const RowRange all = shard_rows(rows, view.shard_bytes.size(), shard);
    const RowRange wanted = {std::max(all.begin, row_begin), std::min(all.end, row_end)};
    if (wanted.begin >= wanted.end) continue;
    // Recombination can be cut anywhere; a shard that must be decompressed is one task.
    const uint64_t weights = (wanted.end - wanted.begin) * columns;
    const uint64_t cuts = prepared.shards[i] == Shard::ready && workers_.threads() > 1
                              ? std::min({divide_up(weights, kSmallestTaskWeights),
                                          workers_.threads() * kTasksPerThread, wanted.end - wanted.begin})
                              : 1;
    for (uint64_t cut = 0; cut < cuts; ++cut) {
      const RowRange part = shard_rows(wanted.end - wanted.begin, cuts, cut);
      pieces.push_back({prepared.shards[i], shard, {wanted.begin + part.begin, wanted.begin + part.end}});
    }
  }
  // What others are working on comes last: it will be there by then. Decompression comes first, it takes longest.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.kind < b.kind; });
  const simd::Recombine recombine = simd::kernels(instruction_set_).recombine;
  workers_.run(static_cast<uint32_t>(pieces.size()), [&](uint32_t task) {
    const Piece& piece = pieces[task];
    uint16_t* target = out + (piece.rows.begin - row_begin) * columns;
    if (piece.kind == Shard::absent) {
      codec_.decode_rows(view, piece.rows.begin, piece.rows.end, target, instruction_set_);
      return;
    }
    if (piece.kind == Shard::coming) prepared.await(piece.shard);
    const uint64_t begin = piece.rows.begin * columns;
    recombine(prepared.exponents + begin, view.sections[1].data() + begin,
              (piece.rows.end - piece.rows.begin) * columns, target);
  });
}

void RowDecoder::gather(std::span<const MatrixView> blocks, std::span<const int64_t> rows, uint16_t* out) {
  gather(blocks, rows, ascending_order(rows), out);
}

void RowDecoder::gather(std::span<const MatrixView> blocks, std::span<const int64_t> rows,
                        std::span<const uint32_t> order, uint16_t* out) {
  if (order.empty()) return;
  const uint64_t columns = blocks.front().shape.columns;
  // A batch is decoded in one call: a single row, or, where the codec's unit is large, wanted rows of one unit.
  struct Batch {
    const MatrixView* block;
    uint64_t block_begin;  // number of the block's first row
    size_t begin;          // positions in `order`
    size_t end;
  };
  const auto row_at = [&](size_t i) { return static_cast<uint64_t>(rows[order[i]]); };
  std::vector<Batch> batches;
  const MatrixView* block = &blocks.front();
  uint64_t block_begin = 0;
  for (size_t i = 0; i < order.size();) {
    while (row_at(i) >= block_begin + block->shape.rows) block_begin += (block++)->shape.rows;
    const uint64_t row = row_at(i) - block_begin;
    const RowRange unit = codec_.split_at(*block, row);
    const uint64_t batch_rows =
        unit.end - unit.begin > kRowsDecodedAlone ? std::max<uint64_t>(1, kBatchWeights / columns) : 1;
    const uint64_t row_limit = block_begin + std::min(unit.end, row + batch_rows);
    size_t end = i + 1;
    while (end < order.size() && row_at(end) < row_limit) ++end;
    batches.push_back({block, block_begin, i, end});
    i = end;
  }
  const auto tasks = static_cast<uint32_t>(std::min<uint64_t>(batches.size(), workers_.threads()));
  workers_.run(tasks, [&](uint32_t task) {
    std::vector<uint16_t> buffer;
    for (size_t i = batches.size() * task / tasks; i < batches.size() * (task + 1) / tasks; ++i) {
      const Batch& batch = batches[i];
      const uint64_t row_begin = row_at(batch.begin);
      const uint64_t row_end = row_at(batch.end - 1) + 1;
      uint16_t* decoded = out + order[batch.begin] * columns;
      if (row_end - row_begin > 1) {
        buffer.resize((row_end - row_begin) * columns);
        decoded = buffer.data();
      }
      codec_.decode_rows(*batch.block, row_begin - batch.block_begin, row_end - batch.block_begin, decoded,
                         instruction_set_);
      for (size_t wanted = batch.begin; wanted < batch.end; ++wanted) {
        uint16_t* target = out + order[wanted] * columns;
        const uint16_t* source = decoded + (row_at(wanted) - row_begin) * columns;
        if (target != source) std::memcpy(target, source, columns * sizeof(uint16_t));
      }
    }
  });
}

}  // namespace zipmoe
