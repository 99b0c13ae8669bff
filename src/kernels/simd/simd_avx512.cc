#include "kernels/simd/simd_highway.h"
#include "kernels/simd/simd_tables.h"

#if HWY_STATIC_TARGET != HWY_AVX3
#error "the flags of this file must select HWY_AVX3"
#endif

namespace fathom::kernels {

const SimdOps& Avx512Ops() {
  static constexpr SimdOps ops = MakeOps("avx512");
  return ops;
}

}  // namespace fathom::kernels
