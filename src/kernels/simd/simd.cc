#include "kernels/simd/simd.h"

#include <vector>

#include "kernels/simd/simd_tables.h"

namespace fathom::kernels {

std::span<const SimdOps* const> UsableSimdOps() {
  static const std::vector<const SimdOps*> usable = [] {
    std::vector<const SimdOps*> ops = {&ScalarOps()};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2")) {
      ops.push_back(&Avx2Ops());
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512cd")) {
        ops.push_back(&Avx512Ops());
      }
    }
#endif
    return ops;
  }();
  return usable;
}

const SimdOps& Simd() {
  static const SimdOps& best = *UsableSimdOps().back();
  return best;
}

}  // namespace fathom::kernels
