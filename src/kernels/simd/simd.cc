#include "kernels/simd/simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <vector>

#include "kernels/simd/simd_tables.h"

namespace fathom::kernels {
namespace {

#if defined(__x86_64__)
// Clang's __builtin_cpu_supports does not know this one.
bool HasF16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

}  // namespace

std::span<const SimdOps* const> UsableSimdOps() {
  static const std::vector<const SimdOps*> usable = [] {
    std::vector<const SimdOps*> ops = {&ScalarOps()};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c() &&
        __builtin_cpu_supports("bmi2")) {
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
