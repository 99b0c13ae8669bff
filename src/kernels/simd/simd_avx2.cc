#include "kernels/simd/simd_highway.h"
#include "kernels/simd/simd_tables.h"

#if HWY_STATIC_TARGET != HWY_AVX2
#error "the flags of this file must select HWY_AVX2"
#endif

namespace fathom::kernels {

const SimdOps& Avx2Ops() {
  static constexpr SimdOps ops = MakeOps("avx2");
  return ops;
}

}  // namespace fathom::kernels
