// Which codecs have kernels that compute on their packed form, and how a packed matrix is handed to them.
#pragma once
#include "codec/codec.hpp"
#include "compute/weight_matrix.hpp"

namespace zipmoe {

// The matrix where it lies. Throws std::invalid_argument if the codec has no such kernels (Capabilities::fused says
// so), FormatError if the bytes are not of this shape.
WeightMatrix packed_matrix(const Codec& codec, const MatrixView& view);

}  // namespace zipmoe
