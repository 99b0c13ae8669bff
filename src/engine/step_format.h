// What both ends of step_codec.h share: the flags of a sequence in a plan, and a record of the
// disk.
#pragma once

#include <cstdint>

#include "comm/byte_codec.h"
#include "request/kv_transfers.h"

namespace fathom::engine {

inline constexpr uint8_t kKnownSequence = 1;  // it was in the step before
inline constexpr uint8_t kSamples = 2;
inline constexpr uint8_t kHasMask = 4;

void PutRecord(const request::KvRecord& record, comm::ByteWriter& out);
// False when it is none.
bool GetRecord(comm::ByteReader& in, int vocab_size, request::KvRecord& record);

}  // namespace fathom::engine
