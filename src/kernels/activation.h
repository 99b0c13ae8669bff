// The type of an activation is the numerics: BFloat16 in official numerics, float in fp32 numerics.
// An operator is a template on it: it loads to FP32, computes in FP32 and stores through the type,
// so the same source has the rounding points of both. Round<T> is the specification's b() (nothing
// for float).
#pragma once

#include <type_traits>

#include "base/float_types.h"

namespace fathom::kernels {

template <typename T>
inline constexpr bool kIsOfficial = std::is_same_v<T, BFloat16>;

inline float ToFloat(BFloat16 value) { return static_cast<float>(value); }
inline float ToFloat(float value) { return value; }

template <typename T>
inline T FromFloat(float value) {
  return T(value);
}

template <typename T>
inline float Round(float value) {
  return ToFloat(FromFloat<T>(value));
}

}  // namespace fathom::kernels
