// The tables of simd.h that are compiled for one x86 instruction set; simd.cc chooses. To be called
// only where the processor has it.
#pragma once

#include "kernels/simd/simd.h"

namespace fathom::kernels {

const SimdOps& Avx2Ops();
const SimdOps& Avx512Ops();

}  // namespace fathom::kernels
