// The flags of a sequence in a plan, for both ends (step_codec.h).
#pragma once

#include <cstdint>

namespace fathom::engine {

inline constexpr uint8_t kKnownSequence = 1;  // it was in the step before
inline constexpr uint8_t kSamples = 2;
inline constexpr uint8_t kHasMask = 4;

}  // namespace fathom::engine
