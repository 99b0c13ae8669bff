// The loops of simd.h in Highway, compiled once per instruction set: a source file that is compiled
// with that set's flags includes this one. Everything here has internal linkage and calls nothing
// but Highway's always-inlined operations, so no function compiled for a newer processor can be
// linked in elsewhere.
#pragma once

#define HWY_COMPILE_ONLY_STATIC
#define HWY_DISABLE_PCLMUL_AES  // not used: need not be there
#include <hwy/highway.h>

#include "kernels/simd/exp_constants.h"
#include "kernels/simd/row_loops.h"
#include "kernels/simd/simd.h"

namespace fathom::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

#define FATHOM_UNROLL _Pragma("GCC unroll 16")

using FloatTag = hn::CappedTag<float, 16>;
using FloatVec = hn::Vec<FloatTag>;
constexpr FloatTag kFloat;
constexpr int kVecLanes = HWY_MAX_BYTES < 64 ? HWY_MAX_BYTES / 4 : 16;
constexpr int kVecs = 16 / kVecLanes;  // registers that hold the 16 canonical lanes

// The tile of accumulators that fits the registers.
constexpr int kTileM = kVecs == 1 ? 4 : 1;
constexpr int kTileN = 4;

struct Float16Lanes {
  FloatVec v[kVecs];
};

HWY_INLINE Float16Lanes LoadLanes(const float* p) {
  Float16Lanes r;
  FATHOM_UNROLL
  for (int i = 0; i < kVecs; ++i) r.v[i] = hn::LoadU(kFloat, p + i * kVecLanes);
  return r;
}

HWY_INLINE void StoreLanes(const Float16Lanes& x, float* p) {
  FATHOM_UNROLL
  for (int i = 0; i < kVecs; ++i) hn::StoreU(x.v[i], kFloat, p + i * kVecLanes);
}

HWY_INLINE Float16Lanes WidenBFloat16(const uint16_t* p) {
  const hn::Rebind<uint16_t, FloatTag> u16;
  const hn::Rebind<uint32_t, FloatTag> u32;
  Float16Lanes r;
  FATHOM_UNROLL
  for (int i = 0; i < kVecs; ++i) {
    const auto bits = hn::PromoteTo(u32, hn::LoadU(u16, p + i * kVecLanes));
    r.v[i] = hn::BitCast(kFloat, hn::ShiftLeft<16>(bits));
  }
  return r;
}

// An e4m3 code's exponent and mantissa, placed as FP16's, read 2^-8 of the value; subnormals fit
// too. `factor` is 256 times the scale.
constexpr float kFp8Factor = 256.0f;
HWY_INLINE Float16Lanes WidenFp8(const uint8_t* p, FloatVec factor) {
  const hn::Rebind<int8_t, FloatTag> i8;
  const hn::Rebind<int16_t, FloatTag> i16;
  const hn::Rebind<hwy::float16_t, FloatTag> f16;
  Float16Lanes r;
  FATHOM_UNROLL
  for (int i = 0; i < kVecs; ++i) {
    const auto codes = hn::LoadU(i8, reinterpret_cast<const int8_t*>(p) + i * kVecLanes);
    const auto shifted = hn::ShiftLeft<7>(hn::PromoteTo(i16, codes));
    const auto bits = hn::And(shifted, hn::Set(i16, static_cast<int16_t>(0xbfff)));
    r.v[i] = hn::Mul(hn::PromoteTo(kFloat, hn::BitCast(f16, bits)), factor);
  }
  return r;
}

// 8 bytes, 16 codes: a byte table gives twice the value as an integer. `factor` is half the scale.
constexpr float kFp4Factor = 0.5f;
template <typename Tag = FloatTag>
HWY_INLINE Float16Lanes WidenFp4(const uint8_t* p, FloatVec factor) {
  alignas(16) static constexpr int8_t kTwiceValue[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                         0, -1, -2, -3, -4, -6, -8, -12};
  const hn::FixedTag<uint8_t, 8> u8x8;
  const hn::FixedTag<uint16_t, 8> u16x8;
  const hn::FixedTag<int8_t, 16> i8x16;
  const hn::Rebind<int8_t, Tag> i8;
  const hn::Rebind<int32_t, Tag> i32;
  const auto pairs = hn::PromoteTo(u16x8, hn::LoadU(u8x8, p));
  const auto nibbles = hn::And(hn::Or(pairs, hn::ShiftLeft<4>(pairs)), hn::Set(u16x8, 0x0f0f));
  const auto twice =
      hn::TableLookupBytes(hn::Load(i8x16, kTwiceValue), hn::BitCast(i8x16, nibbles));
  Float16Lanes r;
  if constexpr (kVecs == 1) {
    r.v[0] = hn::Mul(hn::ConvertTo(kFloat, hn::PromoteTo(i32, twice)), factor);
  } else {
    const auto low = hn::LowerHalf(i8, twice);
    const auto high = hn::UpperHalf(i8, twice);
    r.v[0] = hn::Mul(hn::ConvertTo(kFloat, hn::PromoteTo(i32, low)), factor);
    r.v[kVecs - 1] = hn::Mul(hn::ConvertTo(kFloat, hn::PromoteTo(i32, high)), factor);
  }
  return r;
}

// 2^(byte - 127), as base/float_types.h.
HWY_INLINE float ScaleValue(uint8_t byte) {
  const uint32_t bits = byte == 0 ? 0x00400000u : uint32_t{byte} << 23;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rows of a weight matrix, from first_row. Load gives 16 values of row j from column k; Factor is
// what it needs for the columns that share a scale, kScaleCols of them (0: there are no scales).
// LoadTail gives the last, fewer than 16 values and zeros; the columns of quantized weights are
// whole.
struct FloatRows {
  static constexpr int kScaleCols = 0;
  FloatRows(const float* rows, int64_t cols) : data(rows), stride(cols) {}
  FloatRows(const WeightMatrix& w, int64_t first_row)
      : FloatRows(reinterpret_cast<const float*>(w.data) + first_row * w.cols, w.cols) {}
  HWY_INLINE FloatVec Factor(int, int64_t) const { return hn::Zero(kFloat); }
  HWY_INLINE Float16Lanes Load(int64_t j, int64_t k, FloatVec) const {
    return LoadLanes(data + j * stride + k);
  }
  HWY_INLINE Float16Lanes LoadTail(int j, int64_t k, int64_t count) const {
    float padded[16] = {};
    __builtin_memcpy(padded, data + j * stride + k, static_cast<size_t>(count) * sizeof(float));
    return LoadLanes(padded);
  }
  const float* data;
  int64_t stride;
};

struct BFloat16Rows {
  static constexpr int kScaleCols = 0;
  BFloat16Rows(const WeightMatrix& w, int64_t first_row)
      : data(reinterpret_cast<const uint16_t*>(w.data) + first_row * w.cols), stride(w.cols) {}
  HWY_INLINE FloatVec Factor(int, int64_t) const { return hn::Zero(kFloat); }
  HWY_INLINE Float16Lanes Load(int64_t j, int64_t k, FloatVec) const {
    return WidenBFloat16(data + j * stride + k);
  }
  HWY_INLINE Float16Lanes LoadTail(int j, int64_t k, int64_t count) const {
    uint16_t padded[16] = {};
    __builtin_memcpy(padded, data + j * stride + k, static_cast<size_t>(count) * sizeof(uint16_t));
    return WidenBFloat16(padded);
  }
  const uint16_t* data;
  int64_t stride;
};

struct Fp8Rows {
  static constexpr int kScaleCols = 128;
  Fp8Rows(const WeightMatrix& w, int64_t row)
      : data(reinterpret_cast<const uint8_t*>(w.data) + row * w.cols),
        stride(w.cols),
        scales(w.scales),
        scale_stride((w.cols + 127) / 128),
        first_row(row) {}
  HWY_INLINE FloatVec Factor(int j, int64_t k) const {
    const uint8_t scale = scales[(first_row + j) / 128 * scale_stride + k / 128];
    return hn::Set(kFloat, ScaleValue(scale) * kFp8Factor);
  }
  HWY_INLINE Float16Lanes Load(int64_t j, int64_t k, FloatVec factor) const {
    return WidenFp8(data + j * stride + k, factor);
  }
  HWY_INLINE Float16Lanes LoadTail(int j, int64_t k, int64_t) const {
    return Load(j, k, Factor(j, k));
  }
  const uint8_t* data;
  int64_t stride;
  const uint8_t* scales;
  int64_t scale_stride;
  int64_t first_row;
};

struct Fp4Rows {
  static constexpr int kScaleCols = 32;
  Fp4Rows(const WeightMatrix& w, int64_t first_row)
      : data(reinterpret_cast<const uint8_t*>(w.data) + first_row * (w.cols / 2)),
        stride(w.cols / 2),
        scales(w.scales + first_row * (w.cols / 32)),
        scale_stride(w.cols / 32) {}
  HWY_INLINE FloatVec Factor(int j, int64_t k) const {
    return hn::Set(kFloat, ScaleValue(scales[j * scale_stride + k / 32]) * kFp4Factor);
  }
  HWY_INLINE Float16Lanes Load(int64_t j, int64_t k, FloatVec factor) const {
    return WidenFp4(data + j * stride + k / 2, factor);
  }
  HWY_INLINE Float16Lanes LoadTail(int j, int64_t k, int64_t) const {
    return Load(j, k, Factor(j, k));
  }
  const uint8_t* data;
  int64_t stride;
  const uint8_t* scales;
  int64_t scale_stride;
};

// The end of the columns from k that share a scale, at most `end`.
template <typename Rows>
HWY_INLINE int64_t ScaleEnd(int64_t k, int64_t end) {
  if constexpr (Rows::kScaleCols == 0) return end;
  const int64_t next = k + (Rows::kScaleCols - k % (Rows::kScaleCols == 0 ? 1 : Rows::kScaleCols));
  return next < end ? next : end;
}

using Vec4 = hn::Vec<hn::FixedTag<float, 4>>;

// The first two steps of the fixed tree: 16 lanes to 4.
template <typename Lanes>
HWY_INLINE Vec4 ReduceTo4(const Lanes& x) {
  const hn::FixedTag<float, 8> d8;
  const hn::FixedTag<float, 4> d4;
  if constexpr (kVecs == 1) {
    const auto sum8 = hn::Add(hn::LowerHalf(d8, x.v[0]), hn::UpperHalf(d8, x.v[0]));
    return hn::Add(hn::LowerHalf(d4, sum8), hn::UpperHalf(d4, sum8));
  } else {
    const auto sum8 = hn::Add(x.v[0], x.v[kVecs - 1]);
    return hn::Add(hn::LowerHalf(d4, sum8), hn::UpperHalf(d4, sum8));
  }
}

// The last two steps, for four sums at once.
HWY_INLINE Vec4 Reduce4(Vec4 a, Vec4 b, Vec4 c, Vec4 e) {
  const hn::FixedTag<float, 4> d4;
  const Vec4 ab = hn::Add(hn::ConcatLowerLower(d4, b, a), hn::ConcatUpperUpper(d4, b, a));
  const Vec4 ce = hn::Add(hn::ConcatLowerLower(d4, e, c), hn::ConcatUpperUpper(d4, e, c));
  return hn::Add(hn::ConcatEven(d4, ce, ab), hn::ConcatOdd(d4, ce, ab));
}

template <int kN>
HWY_INLINE void StoreSums(const Float16Lanes* sums, float* y) {
  const hn::FixedTag<float, 4> d4;
  if constexpr (kN == 4) {
    hn::StoreU(
        Reduce4(ReduceTo4(sums[0]), ReduceTo4(sums[1]), ReduceTo4(sums[2]), ReduceTo4(sums[3])), d4,
        y);
  } else {
    static_assert(kN == 1);
    const Vec4 a = ReduceTo4(sums[0]);
    *y = hn::GetLane(Reduce4(a, a, a, a));
  }
}

template <int kM, int kN, typename Rows>
HWY_INLINE void DotTile(const float* x, int64_t x_stride, const Rows& w, int row, int64_t size,
                        float* y, int64_t y_stride) {
  Float16Lanes sums[kM][kN];
  FATHOM_UNROLL
  for (int i = 0; i < kM; ++i) {
    FATHOM_UNROLL
    for (int j = 0; j < kN; ++j) {
      FATHOM_UNROLL
      for (int l = 0; l < kVecs; ++l) sums[i][j].v[l] = hn::Zero(kFloat);
    }
  }
  const auto accumulate = [&](const Float16Lanes* a, const Float16Lanes* b) HWY_ATTR {
    FATHOM_UNROLL
    for (int i = 0; i < kM; ++i) {
      FATHOM_UNROLL
      for (int j = 0; j < kN; ++j) {
        FATHOM_UNROLL
        for (int l = 0; l < kVecs; ++l) {
          sums[i][j].v[l] = hn::MulAdd(a[i].v[l], b[j].v[l], sums[i][j].v[l]);
        }
      }
    }
  };
  const int64_t whole = size / 16 * 16;
  int64_t k = 0;
  while (k < whole) {
    FloatVec factors[kN];
    FATHOM_UNROLL
    for (int j = 0; j < kN; ++j) factors[j] = w.Factor(row + j, k);
    const int64_t end = ScaleEnd<Rows>(k, whole);
    for (; k < end; k += 16) {
      Float16Lanes a[kM], b[kN];
      FATHOM_UNROLL
      for (int j = 0; j < kN; ++j) b[j] = w.Load(row + j, k, factors[j]);
      FATHOM_UNROLL
      for (int i = 0; i < kM; ++i) a[i] = LoadLanes(x + i * x_stride + k);
      accumulate(a, b);
    }
  }
  if (k < size) {
    Float16Lanes a[kM], b[kN];
    const FloatRows x_rows(x, x_stride);
    for (int j = 0; j < kN; ++j) b[j] = w.LoadTail(row + j, k, size - k);
    for (int i = 0; i < kM; ++i) a[i] = x_rows.LoadTail(i, k, size - k);
    accumulate(a, b);
  }
  FATHOM_UNROLL
  for (int i = 0; i < kM; ++i) StoreSums<kN>(sums[i], y + i * y_stride);
}

template <int kM, typename Rows>
HWY_INLINE void DotRows(const DotBlock& b, const Rows& w, int i) {
  const float* x = b.x + i * b.x_stride;
  float* y = b.y + i * b.y_stride;
  int j = 0;
  for (; j + kTileN <= b.n; j += kTileN) {
    DotTile<kM, kTileN>(x, b.x_stride, w, j, b.w.cols, y + j, b.y_stride);
  }
  for (; j < b.n; ++j) DotTile<kM, 1>(x, b.x_stride, w, j, b.w.cols, y + j, b.y_stride);
}

template <typename Rows>
void DotAll(const DotBlock& b, const Rows& w) {
  int i = 0;
  for (; i + kTileM <= b.m; i += kTileM) DotRows<kTileM>(b, w, i);
  for (; i < b.m; ++i) DotRows<1>(b, w, i);
}

// Weights that are used often are widened once.
template <typename Rows>
void DotWidened(const DotBlock& b, const Rows& w) {
  constexpr int kFewRows = kTileM > 2 ? kTileM : 2;
  if (b.panel == nullptr || b.m <= kFewRows || b.w.cols % 16 != 0) {
    DotAll(b, w);
    return;
  }
  for (int j = 0; j < b.n; ++j) {
    float* out = b.panel + j * b.w.cols;
    for (int64_t k = 0; k < b.w.cols;) {
      const FloatVec factor = w.Factor(j, k);
      const int64_t end = ScaleEnd<Rows>(k, b.w.cols);
      for (; k < end; k += 16) StoreLanes(w.Load(j, k, factor), out + k);
    }
  }
  DotAll(b, FloatRows(b.panel, b.w.cols));
}

void RunDotBlock(const DotBlock& b) {
  switch (b.w.dtype) {
    case WeightDType::kF32:
      return DotAll(b, FloatRows(b.w, b.first_row));
    case WeightDType::kBF16:
      return DotWidened(b, BFloat16Rows(b.w, b.first_row));
    case WeightDType::kFp8:
      return DotWidened(b, Fp8Rows(b.w, b.first_row));
    case WeightDType::kFp4:
      return DotWidened(b, Fp4Rows(b.w, b.first_row));
  }
}

float Dot(const float* a, const float* b, int64_t size) {
  float y;
  DotTile<1, 1>(a, 0, FloatRows(b, 0), 0, size, &y, 0);
  return y;
}

template <int kM, int kC, typename Rows>
HWY_INLINE void SumTile(const WeightedSum& s, const Rows& v_rows, int i0, int c0) {
  Float16Lanes sums[kM][kC];
  FATHOM_UNROLL
  for (int i = 0; i < kM; ++i) {
    FATHOM_UNROLL
    for (int c = 0; c < kC; ++c) sums[i][c] = LoadLanes(s.o + (i0 + i) * s.o_stride + c0 + c * 16);
  }
  const FloatVec no_factor = hn::Zero(kFloat);
  for (int64_t j = 0; j < s.v.rows; ++j) {
    Float16Lanes v[kC];
    FATHOM_UNROLL
    for (int c = 0; c < kC; ++c) v[c] = v_rows.Load(j, c0 + c * 16, no_factor);
    FATHOM_UNROLL
    for (int i = 0; i < kM; ++i) {
      const FloatVec p = hn::Set(kFloat, s.p[(i0 + i) * s.p_stride + j]);
      FATHOM_UNROLL
      for (int c = 0; c < kC; ++c) {
        FATHOM_UNROLL
        for (int l = 0; l < kVecs; ++l) sums[i][c].v[l] = hn::MulAdd(p, v[c].v[l], sums[i][c].v[l]);
      }
    }
  }
  FATHOM_UNROLL
  for (int i = 0; i < kM; ++i) {
    FATHOM_UNROLL
    for (int c = 0; c < kC; ++c) StoreLanes(sums[i][c], s.o + (i0 + i) * s.o_stride + c0 + c * 16);
  }
}

template <int kM, typename Rows>
HWY_INLINE void SumRows(const WeightedSum& s, const Rows& v, int i) {
  constexpr int kC = kVecs == 1 ? 4 : 2;
  const int size = static_cast<int>(s.v.cols);
  int c = 0;
  for (; c + kC * 16 <= size; c += kC * 16) SumTile<kM, kC>(s, v, i, c);
  for (; c < size; c += 16) SumTile<kM, 1>(s, v, i, c);
}

template <typename Rows>
void SumAll(const WeightedSum& s, const Rows& v) {
  constexpr int kM = kVecs == 1 ? 4 : 2;
  int i = 0;
  for (; i + kM <= s.m; i += kM) SumRows<kM>(s, v, i);
  for (; i < s.m; ++i) SumRows<1>(s, v, i);
}

void RunWeightedSum(const WeightedSum& s) {
  if (s.v.dtype == WeightDType::kBF16) {
    SumAll(s, BFloat16Rows(s.v, 0));
  } else {
    SumAll(s, FloatRows(s.v, 0));
  }
}

void BFloat16ToFloat(const BFloat16* in, float* out, int64_t size) {
  const auto* bits = reinterpret_cast<const uint16_t*>(in);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) StoreLanes(WidenBFloat16(bits + i), out + i);
  for (; i < size; ++i) {
    const uint32_t wide = uint32_t{bits[i]} << 16;
    __builtin_memcpy(out + i, &wide, sizeof(wide));
  }
}

void Fp8ToFloat(const uint8_t* codes, float scale, float* out, int64_t size) {
  const FloatVec factor = hn::Set(kFloat, scale * kFp8Factor);
  for (int64_t i = 0; i < size; i += 16) StoreLanes(WidenFp8(codes + i, factor), out + i);
}

void Fp4ToFloat(const uint8_t* codes, float scale, float* out, int64_t size) {
  const FloatVec factor = hn::Set(kFloat, scale * kFp4Factor);
  for (int64_t i = 0; i < size; i += 16) StoreLanes(WidenFp4(codes + i / 2, factor), out + i);
}

// Half a FloatVec of exponentials.
using HalfTag = hn::Half<FloatTag>;
HWY_INLINE hn::Vec<HalfTag> ExpHalf(hn::Vec<HalfTag> x) {
  constexpr HalfTag f32;
  const hn::Rebind<double, HalfTag> f64;
  const hn::Rebind<uint64_t, HalfTag> u64;
  const hn::Rebind<int64_t, HalfTag> i64;
  const auto wide = hn::PromoteTo(f64, x);
  const auto scale = hn::Set(f64, kExpScale), shift = hn::Set(f64, kExpShift);
  const auto shifted = hn::MulAdd(scale, wide, shift);
  const auto k = hn::BitCast(u64, shifted);
  const auto r = hn::MulSub(scale, wide, hn::Sub(shifted, shift));
  const auto high = hn::MulAdd(hn::Set(f64, kExpC0), r, hn::Set(f64, kExpC1));
  const auto low = hn::MulAdd(hn::Set(f64, kExpC2), r, hn::Set(f64, 1.0));
  const auto entry = hn::BitCast(i64, hn::And(k, hn::Set(u64, 31)));
  const auto power = hn::Add(hn::GatherIndex(u64, kExpTable, entry), hn::ShiftLeft<47>(k));
  const auto y = hn::Mul(hn::MulAdd(high, hn::Mul(r, r), low), hn::BitCast(f64, power));
  const auto in_range =
      hn::IfThenZeroElse(hn::Lt(x, hn::Set(f32, kExpUnderflow)), hn::DemoteTo(f32, y));
  const auto above = hn::Gt(x, hn::Set(f32, kExpOverflow));
  return hn::IfThenElse(above, hn::Set(f32, __builtin_inff()), in_range);
}

void Exp(const float* in, float* out, int64_t size) {
  constexpr HalfTag f32;
  constexpr int kLanes = kVecLanes / 2;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    hn::StoreU(ExpHalf(hn::LoadU(f32, in + i)), f32, out + i);
  }
  if (i == size) return;
  float rest[kLanes] = {};
  __builtin_memcpy(rest, in + i, static_cast<size_t>(size - i) * sizeof(float));
  hn::StoreU(ExpHalf(hn::LoadU(f32, rest)), f32, rest);
  __builtin_memcpy(out + i, rest, static_cast<size_t>(size - i) * sizeof(float));
}

constexpr SimdOps MakeOps(const char* name) {
  return {name,
          RunDotBlock,
          RunWeightedSum,
          Dot,
          BFloat16ToFloat,
          Fp8ToFloat,
          Fp4ToFloat,
          Exp,
          FloatToBFloat16,
          RoundToBFloat16Row,
          MaxMagnitude,
          RoundToFp8,
          Fp8Codes,
          Fp4Codes};
}

}  // namespace
}  // namespace fathom::kernels
