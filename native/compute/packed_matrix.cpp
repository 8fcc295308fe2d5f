#include "compute/packed_matrix.hpp"

#include <stdexcept>
#include <string>

#include "codec/fx3.hpp"

namespace zipmoe {

WeightMatrix packed_matrix(const Codec& codec, const MatrixView& view) {
  if (dynamic_cast<const Fx3Codec*>(&codec) != nullptr) return WeightMatrix::fx3(view.sections[0], view.shape);
  throw std::invalid_argument("nothing computes on the packed form of " + std::string(codec.name()));
}

}  // namespace zipmoe
