// wgmma: D[64, N] += A[64, k] * B[k, N]^T by one warpgroup, FP32 accumulators. A comes from shared
// memory (a descriptor) or from registers, B from shared memory, both in 128-byte swizzled rows.
//   e4m3: k = 32; bf16: k = 16. Thread (warp w, lane l) holds rows 16 w + l / 4 and + 8, columns
//   8 j + 2 (l % 4) + {0, 1}: d[4 j + {0, 1}] and d[4 j + {2, 3}].
//   A registers: a[0] row g, a[1] row g + 8, columns 4 (l % 4).. (e4m3) or 2 (l % 4).. (bf16);
//   a[2], a[3] the same rows, 16 (e4m3) or 8 (bf16) columns further.
// Operands of asm cannot be a template's pack, so macros spell them out.
#pragma once

#include <cstdint>

namespace fathom::kernels {

// The descriptor of 8-row groups 1024 bytes apart with 128-byte swizzle.
__device__ inline uint64_t SmemDescriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) |
         (1ull << 62);
}
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Results of wgmma may only be read below the wait for them.
template <int kCount>
__device__ __forceinline__ void ReadyRegisters(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value)::"memory");
}

enum class WgmmaType { kE4m3, kBf16 };

// D's registers as operands, N / 2 of a thread, …
#define FATHOM_WGMMA_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define FATHOM_WGMMA_D8(i) FATHOM_WGMMA_D4(i), FATHOM_WGMMA_D4((i) + 4)
#define FATHOM_WGMMA_D12(i) FATHOM_WGMMA_D8(i), FATHOM_WGMMA_D4((i) + 8)
#define FATHOM_WGMMA_D16(i) FATHOM_WGMMA_D8(i), FATHOM_WGMMA_D8((i) + 8)
#define FATHOM_WGMMA_D20(i) FATHOM_WGMMA_D16(i), FATHOM_WGMMA_D4((i) + 16)
#define FATHOM_WGMMA_D24(i) FATHOM_WGMMA_D16(i), FATHOM_WGMMA_D8((i) + 16)
#define FATHOM_WGMMA_D28(i) FATHOM_WGMMA_D20(i), FATHOM_WGMMA_D8((i) + 20)
#define FATHOM_WGMMA_D32(i) FATHOM_WGMMA_D16(i), FATHOM_WGMMA_D16((i) + 16)
#define FATHOM_WGMMA_D64(i) FATHOM_WGMMA_D32(i), FATHOM_WGMMA_D32((i) + 32)
// … and their names in the instruction.
#define FATHOM_WGMMA_NAMES4 "%0, %1, %2, %3"
#define FATHOM_WGMMA_NAMES8 FATHOM_WGMMA_NAMES4 ", %4, %5, %6, %7"
#define FATHOM_WGMMA_NAMES12 FATHOM_WGMMA_NAMES8 ", %8, %9, %10, %11"
#define FATHOM_WGMMA_NAMES16 FATHOM_WGMMA_NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FATHOM_WGMMA_NAMES20 FATHOM_WGMMA_NAMES16 ", %16, %17, %18, %19"
#define FATHOM_WGMMA_NAMES24 FATHOM_WGMMA_NAMES20 ", %20, %21, %22, %23"
#define FATHOM_WGMMA_NAMES28 FATHOM_WGMMA_NAMES24 ", %24, %25, %26, %27"
#define FATHOM_WGMMA_NAMES32 FATHOM_WGMMA_NAMES28 ", %28, %29, %30, %31"
#define FATHOM_WGMMA_NAMES64                                                          \
  FATHOM_WGMMA_NAMES32                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
  " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

template <WgmmaType kType, int kN>
struct Wgmma;

// One type and width. D: registers of d; I0 to I5: the numbers of the operands behind them.
// A_AND_B, B_ALONE: that they are not transposed, where they might be.
#define FATHOM_WGMMA(TYPE, N, D, SHAPE, A_AND_B, B_ALONE, I0, I1, I2, I3, I4, I5)                  \
  template <>                                                                                      \
  struct Wgmma<WgmmaType::TYPE, N> {                                                               \
    __device__ static void FromSmem(float* d, uint64_t a, uint64_t b, int accumulate) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                        \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" FATHOM_WGMMA_NAMES##D   \
                   "}, %" #I0 ", %" #I1 ", p, 1, 1" A_AND_B ";\n}"                                 \
                   : FATHOM_WGMMA_D##D(0)                                                          \
                   : "l"(a), "l"(b), "r"(accumulate));                                             \
    }                                                                                              \
    __device__ static void FromRegisters(float* d, const uint32_t* a, uint64_t b,                  \
                                         int accumulate) {                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                        \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" FATHOM_WGMMA_NAMES##D   \
                   "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1" B_ALONE ";\n}" \
                   : FATHOM_WGMMA_D##D(0)                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));         \
    }                                                                                              \
  };
#define FATHOM_WGMMA_TYPES(N, D, ...)                                 \
  FATHOM_WGMMA(kE4m3, N, D, "k32.f32.e4m3.e4m3", "", "", __VA_ARGS__) \
  FATHOM_WGMMA(kBf16, N, D, "k16.f32.bf16.bf16", ", 0, 0", ", 0", __VA_ARGS__)
FATHOM_WGMMA_TYPES(8, 4, 4, 5, 6, 7, 8, 9)
FATHOM_WGMMA_TYPES(16, 8, 8, 9, 10, 11, 12, 13)
FATHOM_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20, 21)
FATHOM_WGMMA(kE4m3, 24, 12, "k32.f32.e4m3.e4m3", "", "", 12, 13, 14, 15, 16, 17)
FATHOM_WGMMA(kE4m3, 40, 20, "k32.f32.e4m3.e4m3", "", "", 20, 21, 22, 23, 24, 25)
FATHOM_WGMMA(kE4m3, 48, 24, "k32.f32.e4m3.e4m3", "", "", 24, 25, 26, 27, 28, 29)
FATHOM_WGMMA(kE4m3, 56, 28, "k32.f32.e4m3.e4m3", "", "", 28, 29, 30, 31, 32, 33)
FATHOM_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36, 37)
FATHOM_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68, 69)
#undef FATHOM_WGMMA_TYPES
#undef FATHOM_WGMMA

}  // namespace fathom::kernels
