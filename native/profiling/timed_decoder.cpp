#include "profiling/timed_decoder.hpp"

#include <chrono>
#include <stdexcept>

namespace zipmoe {

double TimedDecoder::decode(std::span<const MatrixView> matrices, uint64_t units, std::span<uint16_t> out) {
  if (matrices.empty()) throw std::invalid_argument("there are no matrices");
  for (const MatrixView& matrix : matrices) {
    if (matrix.shape.columns == 0 || matrix.shape.rows > out.size() / matrix.shape.columns) {
      throw std::invalid_argument("the output is too small");
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t unit = 0; unit < units; ++unit) {
    const MatrixView& matrix = matrices[unit % matrices.size()];
    decoder_.decode(matrix, 0, matrix.shape.rows, out.data());
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace zipmoe
