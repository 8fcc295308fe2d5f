// From the pool F to S: the sign-mantissa bytes are a part of the decoded weights, so they are kept, not read again.
#pragma once

#include "cache/pool_memory.hpp"
#include "runtime/record_table.hpp"

namespace zipmoe {

// Writes the SM-chunks of an expert in F, as a separable codec stores them, into its staged slot (see
// PoolMemory::stage_sign_mantissa), and makes the expert one in S: the slot of its weights is free then.
void demote_to_sign_mantissa(const RecordTable& table, PoolMemory& memory, RecordIndex record, StagedParts staged);

}  // namespace zipmoe
