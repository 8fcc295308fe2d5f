#include "runtime/full_demotion.hpp"

#include <stdexcept>
#include <utility>

#include "codec/bfloat16_fields.hpp"

namespace zipmoe {

void demote_to_sign_mantissa(const RecordTable& table, PoolMemory& memory, RecordIndex record, StagedParts staged) {
  const uint8_t* decoded = memory.full(record);
  uint8_t* part = memory.places(record, staged)[kSignMantissaPart];
  if (part == nullptr) throw std::logic_error("an expert leaves F for S with a slot for its SM-chunks");
  const Record& layout = table[record];
  for (uint32_t i = 0; i < layout.matrices.size(); ++i) {
    const RecordMatrix& matrix = layout.matrices[i];
    const Section& section = matrix.sections.at(kSignMantissaPart);
    const auto* weights = reinterpret_cast<const uint16_t*>(decoded + table.decoded_offset(record, i));
    keep_sign_mantissa({weights, matrix.shape.rows * matrix.shape.columns},
                       {part + (section.offset - layout.extents[kSignMantissaPart].offset), section.length});
  }
  memory.settle(record, std::move(staged), Residency::sign_mantissa);
}

}  // namespace zipmoe
