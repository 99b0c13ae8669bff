// The sums of attention's parts over a long context (attention_long.cuh), of one token: a block has
// half of a head's columns. The parts that a thread adds up are asked for at once, and come to
// shared memory: registers are left to the blocks of the next product, which start beside these.
// Device code only.
#pragma once

#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sparse_attention/attention_long.cuh"
#include "kernels/sparse_attention/head_rows.cuh"

namespace fathom::kernels {

inline constexpr int kSumsThreads = 256;
inline constexpr int kSumsColumns = 256;              // of a block
inline constexpr int kSumsWarps = kSumsThreads / 32;  // each adds up every eighth part
inline constexpr int kWarpParts = (kLongSplits + kSumsWarps - 1) / kSumsWarps;

struct LongSumsShared {
  uint4 parts[kWarpParts][kSumsThreads];  // of a thread, eight columns
  float weights[kWarpParts * kSumsWarps];
  float2 sums[kSumsWarps][4][32 + 1];  // pairs of columns next to each other
};

class LongSums {
 public:
  __device__ LongSums(const CudaSparseAttentionParams& params, const LongParts& parts,
                      LongSumsShared& shared)
      : p_(params),
        s_(shared),
        head_(static_cast<int>(blockIdx.x)),
        first_column_(static_cast<int>(blockIdx.y) * kSumsColumns),
        thread_(static_cast<int>(threadIdx.x)),
        sums_(reinterpret_cast<const uint4*>(parts.sums + int64_t{head_} * LongParts::kHead +
                                             warp() * LongParts::kRow + first_column_ / 2) +
              lane()),
        scales_(parts.scales + head_ * kLongSplits) {}

  __device__ void Run() {
    const TokenKeys keys(p_);
    const int count = (keys.size() + kLongKeys - 1) / kLongKeys;
    const bool padding = p_.batch.token_seq[0] < 0;
    const float sink = p_.sink[head_];
    const float2 angle = Angle();
    // The kernel before has waited for those before it: the next one may start, which waits for
    // this.
    AllowSuccessor();
    WaitForPredecessor();
    if (padding) return;
    const float inverse = 1.0f / MakeWeights(count, sink);
    __syncthreads();
    FinishCopies<0>();
    AddParts();
    __syncthreads();
    if (finishes()) Finish(inverse, angle);
  }

 private:
  __device__ int lane() const { return thread_ % 32; }
  __device__ int warp() const { return thread_ / 32; }
  // Half of the threads finish a pair of columns each. Of the eight columns of 16 bytes four are
  // next to each other, the other four eight further.
  __device__ bool finishes() const { return thread_ < kSumsColumns / 2; }
  __device__ int pair() const { return thread_ % 4; }
  __device__ int column() const {
    const int chunk = thread_ / 4;
    return first_column_ + chunk / 2 * 16 + chunk % 2 * 4 + pair() / 2 * 8 + pair() % 2 * 2;
  }
  __device__ bool rotates() const { return finishes() && column() >= kNumFp8; }
  // Before the wait.
  __device__ float2 Angle() const {
    float2 angle{1, 0};
    if (rotates()) angle = reinterpret_cast<const float2*>(p_.angles)[(column() - kNumFp8) / 2];
    asm volatile("" : "+f"(angle.x), "+f"(angle.y));
    return angle;
  }

  // Asks for the parts. Every warp finds their maximum and sum; the first one keeps their weights.
  __device__ float MakeWeights(int count, float sink) {
    constexpr int kRounds = (kLongSplits + 31) / 32;
    constexpr float kNothing = -__builtin_huge_valf();
    float2 scales[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int i = r * 32 + lane();
      scales[r] = i < count ? scales_[i] : float2{kNothing, 0};
    }
#pragma unroll 1
    for (int k = 0; k < kWarpParts; ++k) {
      CopyAhead(SharedAddress(&s_.parts[k][thread_]), sums_ + k * kSumsWarps * LongParts::kRow / 4,
                k * kSumsWarps + warp() < count);
    }
    CloseCopies();
    float max = kNothing, sum = 0;
#pragma unroll
    for (const float2& s : scales) max = fmaxf(max, s.x);
    max = WarpMax(max);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int i = r * 32 + lane();
      const float weight = exp2f(scales[r].x - max);
      sum += weight * scales[r].y;
      if (warp() == 0 && i < kWarpParts * kSumsWarps) s_.weights[i] = weight;
    }
    return WarpSum(sum) + SinkWeight(sink, max);
  }

  // A warp's.
  __device__ void AddParts() {
    float2 o[4] = {};  // columns c and c + 8
#pragma unroll 3
    for (int k = 0; k < kWarpParts; ++k) {
      const float weight = s_.weights[k * kSumsWarps + warp()];
      const uint4 part = s_.parts[k][thread_];
      const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 v = __half22float2(reinterpret_cast<const __half2&>(words[j]));
        o[j].x = fmaf(weight, v.x, o[j].x), o[j].y = fmaf(weight, v.y, o[j].y);
      }
    }
    s_.sums[warp()][0][lane()] = {o[0].x, o[1].x};
    s_.sums[warp()][1][lane()] = {o[2].x, o[3].x};
    s_.sums[warp()][2][lane()] = {o[0].y, o[1].y};
    s_.sums[warp()][3][lane()] = {o[2].y, o[3].y};
  }

  __device__ void Finish(float inverse, float2 angle) const {
    float2 o{0, 0};
#pragma unroll
    for (const auto& sums : s_.sums) {
      const float2 v = sums[pair()][thread_ / 4];
      o.x += v.x, o.y += v.y;
    }
    uint32_t out = PackBf16(o.x * inverse, o.y * inverse);
    if (rotates()) out = RotateBf16(out, {angle.x, -angle.y});
    const int64_t at = Bf16TileOffset(0, int64_t{head_} * kHeadDim + column(), p_.out.row_groups);
    *reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(p_.out.values) + at) = out;
  }

  const CudaSparseAttentionParams& p_;
  LongSumsShared& s_;
  int head_, first_column_, thread_;
  const uint4* sums_;     // the thread's columns of the warp's first part
  const float2* scales_;  // of the head
};

// Registers for 256 threads beside a block of the next product.
__global__ void __maxnreg__(56)
    LongSumsKernel(const __grid_constant__ CudaSparseAttentionParams p, LongParts parts) {
  __shared__ LongSumsShared shared;
  LongSums(p, parts, shared).Run();
}

}  // namespace fathom::kernels
