// Attention of one token over so many keys that each multiprocessor has many: a block has a tile of
// 128 keys and 32 heads. Its keys are widened once, into shared memory, where the tensor cores read
// them as keys and as values; heads are columns of both products. More heads a block would be more
// queries to prepare in each, fewer would be more keys. LongSumsKernel (long_sums.cuh), whose
// blocks start beside these, adds up the parts, which are FP16: half as many bytes for it to read
// where the weights of the product behind it are on their way. All of it runs once, when
// instructions take longer to come than to do, so what can be a loop is one. Device code only.
#pragma once

#include <cuda_fp16.h>

#include <climits>

#include "kernels/aligned_shared.cuh"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/launch.cuh"
#include "kernels/sm90.cuh"
#include "kernels/sparse_attention/head_rows.cuh"
#include "kernels/sparse_attention/key_rows.cuh"
#include "kernels/sparse_attention/wgmma_values.cuh"

namespace fathom::kernels {

inline constexpr int kLongThreads = 512;
inline constexpr int kLongKeys = 128;
inline constexpr int kLongHeads = 32;
inline constexpr int kLongSplits = 66;       // most
inline constexpr int kScoringThreads = 256;  // two warpgroups, half of the keys each
inline constexpr int kScoringBarrier = 1;    // named

// What the splits leave.
struct LongParts {
  // [num_heads, kLongSplits, 256]: columns c and c + 8 of each 16.
  __half2* sums = nullptr;
  // [num_heads, kLongSplits]: their maximum (log2 units, a whole number) and sum of p.
  float2* scales = nullptr;

  // In halves of a row.
  static constexpr int kRow = kHeadDim / 2, kHead = kLongSplits * kRow;
};

struct LongShared {
  uint8_t keys[8][kLongKeys * 128];  // column blocks, swizzled; first, FP8 codes on their way
  uint8_t queries[8][kLongHeads * 128];
  uint8_t probabilities[2][kLongHeads * 128];  // of 64 keys each, which are the columns
  int max[kLongHeads];                         // log2 units, rounded up
  float sums[kScoringThreads / 32][kLongHeads];
};
inline constexpr size_t kLongSharedBytes = sizeof(LongShared) + 1024;

// The thread's copies since the last call are a group.
__device__ __forceinline__ void CloseCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until all of the thread's groups but the last kPending are there.
template <int kPending>
__device__ __forceinline__ void FinishCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Four 8x8 matrices as mma has them into rows of 16 bytes that are their columns; lane l has the
// address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void StoreMatricesTransposed(uint32_t address, uint4 v) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
// Of eight numbers of each lane: lane l gets the l / 4-th of all lanes with its l % 4.
template <typename Reduce>
__device__ __forceinline__ float ReduceEight(float (&x)[8], Reduce reduce) {
#pragma unroll
  for (int n = 4; n > 0; n /= 2) {
    const bool high = threadIdx.x & (4 * n);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float mine = high ? x[i + n] : x[i], other = high ? x[i] : x[i + n];
      x[i] = reduce(mine, __shfl_xor_sync(0xffffffffu, other, 4 * n));
    }
  }
  return x[0];
}

// The page of the entry that key k is where it is none of the window: before entries there are
// always 128 of these. It is asked for at once with all else.
__device__ __forceinline__ int PageOfEntry(const CudaSparseAttentionParams& p, int k) {
  const int page = max(k - kWindow, 0) >> (__ffs(p.compressed.entries_per_page) - 1);
  int found;
  asm volatile("ld.global.b32 %0, [%1];"
               : "=r"(found)
               : "l"(p.batch.block_tables + min(page, p.batch.max_blocks - 1)));
  return found;
}

class LongAttention {
 public:
  __device__ LongAttention(const CudaSparseAttentionParams& params, LongShared& shared,
                           const TokenKeys& keys, int split, int first_head, int page)
      : p_(params),
        s_(shared),
        keys_(keys),
        split_(split),
        first_head_(first_head),
        page_(page),
        thread_(static_cast<int>(threadIdx.x)) {}

  __device__ void Run(const LongParts& parts) {
    const bool padding = p_.batch.token_seq[0] < 0;
    if (!p_.step_is_early) WaitForPredecessor();
    const uint2 scales = CopyKeys(Key());
    LoadAngles();
    if (thread_ < kLongHeads) s_.max[thread_] = INT_MIN;
    // The launch ends with others, which wait.
    if (padding || split_ * kLongKeys >= keys_.size()) return;
    WaitForPredecessor();
    AllowSuccessor();
    CopyQueries();
    FinishCopies<1>();
    WidenKeys(scales);
    FinishCopies<0>();
    PrepareQueries();
    FenceSharedForWgmma();
    __syncthreads();
    if (thread_ < kScoringThreads) Score();
    __syncthreads();
    AddValues(parts);
    if (thread_ < kLongHeads) WriteScales(parts);
  }

 private:
  static constexpr float kScale = 0.044194173824159216f;  // 512^-0.5
  static constexpr float kNothing = -__builtin_huge_valf();
  // Probabilities are at most 2^-kHeadroom, so that FP16 holds sums of values up to 8,000; of those
  // near 0.002 it still has all its bits. Values are normed entries.
  static constexpr int kHeadroom = 4;

  __device__ int lane() const { return thread_ % 32; }
  __device__ int warpgroup() const { return thread_ / 128; }
  __device__ int warp() const { return thread_ / 32 % 4; }  // of its warpgroup
  // Four threads copy and widen a key.
  __device__ int key_row() const { return thread_ / 4; }
  __device__ int key_lane() const { return thread_ % 4; }
  // 16 threads prepare a head: every 16th chunk of eight columns.
  __device__ int head() const { return thread_ / 16; }
  __device__ int head_lane() const { return thread_ % 16; }
  __device__ bool rotates() const { return head_lane() >= 8; }  // the last chunk
  __device__ bool HasHead(int head) const { return first_head_ + head < p_.num_heads; }

  __device__ void LoadAngles() {
    if (!rotates()) return;
    const auto* angles = reinterpret_cast<const float4*>(p_.angles) + 2 * (head_lane() - 8);
    angles_[0] = angles[0], angles_[1] = angles[1];
  }
  // Each thread copies what it prepares.
  __device__ uint32_t Query(int i) const {
    return SharedAddress(s_.queries) + ChunkOffset<kLongHeads>(head(), head_lane() + 16 * i);
  }
  __device__ void CopyQueries() const {
    const bool exists = HasHead(head());
    const __nv_bfloat16* const q = p_.q + (exists ? int64_t{first_head_ + head()} * kHeadDim : 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      CopyAhead(Query(i), reinterpret_cast<const uint4*>(q) + head_lane() + 16 * i, exists);
    }
    CloseCopies();
  }
  __device__ void PrepareQueries() const {
    uint32_t row[2][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 x = LoadShared(Query(i));
      uint32_t* const to = row[i % 2] + i / 2 * 4;
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    NormHead(row, p_.norm_eps);
    if (rotates()) {
      uint32_t* const last = row[1] + 4;
      last[0] = RotateBf16(last[0], {angles_[0].x, angles_[0].y});
      last[1] = RotateBf16(last[1], {angles_[0].z, angles_[0].w});
      last[2] = RotateBf16(last[2], {angles_[1].x, angles_[1].y});
      last[3] = RotateBf16(last[3], {angles_[1].z, angles_[1].w});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t* const x = row[i % 2] + i / 2 * 4;
      StoreShared(Query(i), {x[0], x[1], x[2], x[3]});
    }
  }

  // Where the thread's 16 codes of FP8 columns 64 n .. come first: in their row of the first four
  // column blocks, of which each is made when the codes that lie there have been widened.
  __device__ uint32_t Codes(int n) const {
    return SharedAddress(s_.keys[n / 2]) + key_row() * 128 + ((n ^ key_row()) & 1) * 64 +
           key_lane() * 16;
  }
  __device__ KeyBytes Key() const {
    const int key = split_ * kLongKeys + key_row(), entry = key - kWindow;
    if (entry < 0) return keys_.Bytes(key, 0);
    if (key >= keys_.size()) return {};
    const DeviceEntry e =
        EntryAt(p_.compressed, page_, entry & (p_.compressed.entries_per_page - 1));
    return {e.data, e.scales};
  }
  // Returns the key's scales.
  __device__ uint2 CopyKeys(const KeyBytes& key) const {
    const bool exists = key.data != nullptr;
    const auto* data = reinterpret_cast<const uint4*>(exists ? key.data : p_.fresh) + key_lane();
#pragma unroll
    for (int n = 0; n < 7; ++n) CopyAhead(Codes(n), data + 4 * n, exists);
    const uint32_t keys = SharedAddress(s_.keys);
    CopyAhead(keys + ChunkOffset<kLongKeys>(key_row(), 56 + key_lane()), data + 28, exists);
    CopyAhead(keys + ChunkOffset<kLongKeys>(key_row(), 60 + key_lane()), data + 32, exists);
    CloseCopies();
    return exists ? __ldg(reinterpret_cast<const uint2*>(key.scales)) : uint2{0, 0};
  }
  __device__ void WidenKeys(uint2 scales) const {
    const uint32_t keys = SharedAddress(s_.keys);
    const uint32_t low = keys + ChunkOffset<kLongKeys>(key_row(), 2 * key_lane());
    const uint32_t high = keys + ChunkOffset<kLongKeys>(key_row(), 2 * key_lane() + 1);
#pragma unroll 1
    for (int n = 6; n >= 0; --n) {
      const uint4 codes = LoadShared(Codes(n));
      __syncwarp();  // all of the key's threads have theirs
      const uint32_t factor = FactorOf(scales, n);
      const uint2 a = WidenCodes(codes.x, factor), b = WidenCodes(codes.y, factor);
      const uint2 c = WidenCodes(codes.z, factor), d = WidenCodes(codes.w, factor);
      StoreShared(low + n * sizeof(s_.keys[0]), {a.x, a.y, b.x, b.y});
      StoreShared(high + n * sizeof(s_.keys[0]), {c.x, c.y, d.x, d.y});
    }
  }

  // 64 keys, by a warpgroup. As a product has them: keys lane / 4 and + 8 of the warp's 16, heads
  // 8 j + 2 (lane % 4) + {0, 1}.
  __device__ void Score() {
    float d[16] = {};
    uint64_t keys = SmemDescriptor(SharedAddress(s_.keys) + warpgroup() * 64 * 128);
    uint64_t q = SmemDescriptor(SharedAddress(s_.queries));
#pragma unroll 1
    for (int block = 0; block < 8; ++block) {
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<WgmmaType::kBf16, 32>::FromSmem(d, keys + k * 32 / 16, q + k * 32 / 16, 1);
      }
      WgmmaCommit();
      keys += sizeof(s_.keys[0]) / 16, q += sizeof(s_.queries[0]) / 16;
    }
    WgmmaWait<0>();
    const int key = split_ * kLongKeys + warpgroup() * 64 + warp() * 16 + lane() / 4;
    const bool exists[2] = {key < keys_.size(), key + 8 < keys_.size()};
    float most[8], sums[8];  // 2 j + {0, 1}
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int n = i / 4 * 2 + i % 2, r = i / 2 % 2;
      if (!exists[r]) d[i] = kNothing;
      most[n] = r == 0 ? d[i] : fmaxf(most[n], d[i]);
    }
    const int own = lane() / 8 * 8 + 2 * (lane() % 4) + lane() / 4 % 2;
    const float max = ReduceEight(most, [](float a, float b) { return fmaxf(a, b); });
    atomicMax(s_.max + own, __float2int_ru(max * (kScale * kLog2E)) + kHeadroom);
    NamedBarrier(kScoringBarrier, kScoringThreads);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int n = i / 4 * 2 + i % 2;
      const auto max = static_cast<float>(s_.max[i / 4 * 8 + 2 * (lane() % 4) + i % 2]);
      d[i] = exp2f(fmaf(d[i], kScale * kLog2E, -max));
      sums[n] = i / 2 % 2 == 0 ? d[i] : sums[n] + d[i];
    }
    const uint32_t to =
        SharedAddress(s_.probabilities[warpgroup()]) +
        ChunkOffset<kLongHeads>(lane() / 16 * 8 + lane() % 8, 2 * warp() + lane() / 8 % 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* const x = d + 8 * h;
      StoreMatricesTransposed(to + h * 16 * 128, {PackBf16(x[0], x[1]), PackBf16(x[2], x[3]),
                                                  PackBf16(x[4], x[5]), PackBf16(x[6], x[7])});
    }
    FenceSharedForWgmma();
    s_.sums[thread_ / 32][own] = ReduceEight(sums, [](float a, float b) { return a + b; });
  }

  // 128 columns of the sums, by a warpgroup; 64 are written while the others are multiplied.
  __device__ void AddValues(const LongParts& parts) const {
    float first[16] = {}, second[16] = {};
    const int block = 2 * warpgroup();
    MultiplyValues(block, first);
    MultiplyValues(block + 1, second);
    WgmmaWait<1>();
    ReadyRegisters(first);
    WriteColumns(parts, block, first);
    WgmmaWait<0>();
    ReadyRegisters(second);
    WriteColumns(parts, block + 1, second);
  }
  // Of a column block. Columns are the rows of the product.
  __device__ void MultiplyValues(int block, float (&d)[16]) const {
    const uint64_t values = TransposedDescriptor(SharedAddress(s_.keys[block]), sizeof(s_.keys[0]));
    const uint64_t p = SmemDescriptor(SharedAddress(s_.probabilities));
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kLongKeys / 16; ++k) {
      WgmmaValues(d, values + k * 16 * 128 / 16,
                  p + k / 4 * sizeof(s_.probabilities[0]) / 16 + k % 4 * 32 / 16);
    }
    WgmmaCommit();
  }
  __device__ void WriteColumns(const LongParts& parts, int block, const float (&d)[16]) const {
    const int column = block * 32 + warp() * 8 + lane() / 4;
    __half2* const to = parts.sums + int64_t{first_head_} * LongParts::kHead +
                        2 * (lane() % 4) * LongParts::kHead + split_ * LongParts::kRow + column;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int head = n / 2 * 8 + n % 2;  // from the thread's first one
      if (!HasHead(2 * (lane() % 4) + head)) continue;
      const float* const x = d + n / 2 * 4 + n % 2;
      to[head * LongParts::kHead] = __floats2half2_rn(x[0], x[2]);
    }
  }
  // Of a head a thread.
  __device__ void WriteScales(const LongParts& parts) const {
    if (!HasHead(thread_)) return;
    float sum = 0;
#pragma unroll
    for (const auto& sums : s_.sums) sum += sums[thread_];
    parts.scales[(first_head_ + thread_) * kLongSplits + split_] = {
        static_cast<float>(s_.max[thread_]), sum};
  }

  const CudaSparseAttentionParams& p_;
  LongShared& s_;
  const TokenKeys& keys_;
  int split_, first_head_, page_, thread_;
  float4 angles_[2];  // of the thread's last chunk of a head
};

__global__ void __launch_bounds__(kLongThreads, 1)
    LongAttentionKernel(const __grid_constant__ CudaSparseAttentionParams p, LongParts parts) {
  extern __shared__ uint8_t dynamic[];
  const int split = blockIdx.x, head = static_cast<int>(blockIdx.y) * kLongHeads;
  const int page = PageOfEntry(p, split * kLongKeys + static_cast<int>(threadIdx.x) / 4);
  const TokenKeys keys(p);
  LongAttention(p, AlignedShared<LongShared>(dynamic), keys, split, head, page).Run(parts);
}

}  // namespace fathom::kernels
