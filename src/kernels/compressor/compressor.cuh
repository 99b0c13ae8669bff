// The compressors of one layer on the device: a block finishes entries with 256 threads, thread i
// holding channels 2i and 2i + 1 (index keys: the first 64 threads). Rows of earlier steps are read
// from, and later rows written to, the state slot by one block a sequence, and every thread reads
// and writes its own channels only, so the ring needs no barrier. Each function lets the successor
// start and waits for the predecessor itself; before that it reads all that is older: otherwise
// that would queue behind the successor's weights. Device code only.
#pragma once

#include "kernels/attention_prologue/attention_prologue_cuda.h"
#include "kernels/compressor/compressor.h"
#include "kernels/indexer/index_vector.cuh"
#include "kernels/kv_entry/kv_entry.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/rope/rope.cuh"

namespace fathom::kernels {

inline constexpr int kCompressorThreads = 256;

// One sequence's rows for the thread's channels of one compressor. kDim is d, kRatio 4 or 128.
template <int kRatio, int kDim>
class CompressorRows {
 public:
  static constexpr int kWidth = kRatio == 4 ? 2 * kDim : kDim;

  __device__ CompressorRows(const CudaBatch& batch, const CudaCompressor& compressor, int seq,
                            int64_t slot_bytes, int channel)
      : p_(compressor), channel_(channel) {
    first_ = batch.num_computed[seq];
    first_row_ = batch.cu_seqlens_q[seq];
    end_ = first_ + batch.cu_seqlens_q[seq + 1] - first_row_;
    slot_ = compressor.state + batch.state_slots[seq] * slot_bytes;
  }

  __device__ int first() const { return first_; }
  __device__ int end() const { return end_; }

  struct Row {
    float2 c, z;
  };
  // The pair at `column` of the channel pair's row; ape is added to fresh rows only.
  __device__ Row Load(int position, int column) const {
    if (position >= first_) return LoadFresh(position, column);
    const float* row = RingRow(position) + column + channel_;
    return {Pair(row), Pair(row + kWidth)};
  }
  // Of this step. Without a branch, behind which the sum would await each row alone.
  __device__ Row LoadFresh(int position, int column) const {
    const int64_t offset =
        int64_t{first_row_ + position - first_} * p_.row_stride + column + channel_;
    const float2 ape = Pair(p_.ape + position % kRatio * kWidth + column + channel_);
    return {Pair(p_.c + offset), Add(Pair(p_.z + offset), ape)};
  }

  // ape of the step's first row, to the L2 cache.
  __device__ void PrefetchApe() const {
#pragma unroll
    for (int column = 0; column < kWidth; column += kDim) {
      const float* const from = p_.ape + first_ % kRatio * kWidth + column + channel_;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
  }

  // Keeps the step's last rows for later steps.
  __device__ void WriteRing() const {
    for (int position = max(first_, end_ - kCompressorRingRows); position < end_; ++position) {
#pragma unroll
      for (int column = 0; column < kWidth; column += kDim) {
        const Row row = Load(position, column);
        float* out = RingRow(position) + column + channel_;
        *reinterpret_cast<float2*>(out) = row.c;
        *reinterpret_cast<float2*>(out + kWidth) = row.z;
      }
    }
  }

  // Ratio 128.
  __device__ int* merged_end() const { return reinterpret_cast<int*>(slot_); }
  // The thread's pair of m (0), l (1) or acc (2).
  __device__ float2* stored(int which) const {
    return reinterpret_cast<float2*>(reinterpret_cast<float*>(slot_ + kC128StateHeaderBytes) +
                                     which * kDim + channel_);
  }

 private:
  __device__ static float2 Pair(const float* p) { return *reinterpret_cast<const float2*>(p); }
  __device__ float* RingRow(int position) const {
    auto* rows = reinterpret_cast<float*>(slot_);
    if (kRatio == 128) rows += kC128StateHeaderBytes / 4 + 3 * kDim;
    return rows + position % kCompressorRingRows * 2 * kWidth;
  }

  const CudaCompressor& p_;
  int channel_;
  int first_ = 0;
  int first_row_ = 0;
  int end_ = 0;
  std::byte* slot_ = nullptr;
};

// What ratio-4 entry j is pooled from.
template <int kDim>
struct RowsC4 {
  typename CompressorRows<4, kDim>::Row pool[8];

  // Rows of earlier steps, or those of this one.
  __device__ void Load(const CompressorRows<4, kDim>& rows, int j, bool fresh) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int position = 4 * j - 4 + r;
      if (position < 0) {
        pool[r] = {{0, 0}, {-__builtin_huge_valf(), -__builtin_huge_valf()}};
      } else if ((position >= rows.first()) == fresh) {
        pool[r] = rows.Load(position, r < 4 ? 0 : kDim);
      }
    }
  }
  // All of this step.
  __device__ void LoadFresh(const CompressorRows<4, kDim>& rows, int j) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int position = 4 * j - 4 + r;
      pool[r] = rows.LoadFresh(max(position, 0), r < 4 ? 0 : kDim);
      if (position < 0) pool[r] = {{0, 0}, {-__builtin_huge_valf(), -__builtin_huge_valf()}};
    }
  }
};

// The softmax pool of a ratio-4 entry.
template <int kDim>
__device__ float2 PoolC4(const RowsC4<kDim>& rows) {
  const auto& pool = rows.pool;
  float2 m = pool[7].z;
#pragma unroll
  for (int r = 0; r < 7; ++r) m = {fmaxf(m.x, pool[r].z.x), fmaxf(m.y, pool[r].z.y)};
  float2 sum{0, 0}, out{0, 0};
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float2 e{expf(pool[r].z.x - m.x), expf(pool[r].z.y - m.y)};
    sum = Add(sum, e);
    out = {out.x + e.x * pool[r].c.x, out.y + e.y * pool[r].c.y};
  }
  return {out.x / sum.x, out.y / sum.y};
}

// One channel of the running softmax of a ratio-128 group.
struct RunningSoftmax {
  float m = -__builtin_huge_valf(), l = 0, acc = 0;

  __device__ void Merge(float c, float z) {
    // One of the two exponentials is exp(0) = 1.
    const float e = expf(-fabsf(z - m));
    const bool larger = z > m;
    const float old_scale = larger ? e : 1.0f, new_scale = larger ? 1.0f : e;
    m = fmaxf(m, z);
    l = l * old_scale + new_scale;
    acc = fmaf(acc, old_scale, new_scale * c);
  }
};
struct RunningPair {
  RunningSoftmax x, y;

  __device__ void Read(const CompressorRows<128, kHeadDim>& rows) {
    const float2 m = *rows.stored(0), l = *rows.stored(1), acc = *rows.stored(2);
    x = {m.x, l.x, acc.x};
    y = {m.y, l.y, acc.y};
  }
  __device__ void Write(const CompressorRows<128, kHeadDim>& rows) const {
    *rows.stored(0) = {x.m, y.m};
    *rows.stored(1) = {x.l, y.l};
    *rows.stored(2) = {x.acc, y.acc};
  }
  // Tokens [from, to).
  __device__ void Merge(const CompressorRows<128, kHeadDim>& rows, int from, int to) {
    constexpr int kAhead = 8;  // rows in flight
    for (int position = from; position < to; position += kAhead) {
      typename CompressorRows<128, kHeadDim>::Row row[kAhead];
#pragma unroll
      for (int r = 0; r < kAhead; ++r) {
        if (position + r < to) row[r] = rows.Load(position + r, 0);
      }
#pragma unroll
      for (int r = 0; r < kAhead; ++r) {
        if (position + r >= to) continue;
        x.Merge(row[r].c.x, row[r].z.x);
        y.Merge(row[r].c.y, row[r].z.y);
      }
    }
  }
  // A whole entry's, all of this step.
  __device__ void MergeFresh(const CompressorRows<128, kHeadDim>& rows, int from) {
    constexpr int kAhead = 8;
#pragma unroll 1
    for (int position = from; position < from + 128; position += kAhead) {
      typename CompressorRows<128, kHeadDim>::Row row[kAhead];
#pragma unroll
      for (int r = 0; r < kAhead; ++r) row[r] = rows.LoadFresh(position + r, 0);
#pragma unroll
      for (int r = 0; r < kAhead; ++r) {
        x.Merge(row[r].c.x, row[r].z.x);
        y.Merge(row[r].c.y, row[r].z.y);
      }
    }
  }
  __device__ float2 Pool() const { return {x.acc / x.l, y.acc / y.l}; }
};

// The sum over the block; every thread must call it. `sums` is shared memory for 8 floats.
__device__ __forceinline__ float BlockSum256(float x, float* sums) {
  x = WarpSum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kCompressorThreads / 32; ++warp) sum += sums[warp];
  return sum;
}

struct CompressorShared {
  float sums[8];
  float key[kIndexDim];
  uint32_t found[kCompressorThreads / 32];
};

// An entry, and what its channel pair is finished with: all older than the predecessor.
template <int kRatio, int kDim>
struct EntryPlace {
  DeviceEntry entry;
  float2 weight{0, 0};
  float2 angle{1, 0};
  bool rotates = false;

  __device__ EntryPlace() = default;
  __device__ EntryPlace(const CudaAttentionPrologueParams& p, const CudaCompressor& compressor,
                        int seq, int j) {
    const int i = threadIdx.x;
    const PagedEntries& cache = compressor.cache;
    const int32_t block =
        p.batch.block_tables[int64_t{seq} * p.batch.max_blocks + j / cache.entries_per_page];
    entry = EntryAt(cache, block, j % cache.entries_per_page);
    if (2 * i >= kDim) return;
    weight = UnpackBf16(reinterpret_cast<const uint32_t*>(compressor.norm)[i]);
    const int pair = i - (kDim - kRopeDim) / 2;
    rotates = pair >= 0;
    if (rotates) angle = RopeAngle(kRatio * j, p.frequencies[pair]);
  }
};

// b() -> RMSNorm -> b() -> rope at position ratio * j -> b() -> stored. The whole block calls it.
template <int kRatio, int kDim>
__device__ void FinishEntry(const CudaAttentionPrologueParams& p,
                            const EntryPlace<kRatio, kDim>& place, float2 pooled,
                            CompressorShared& shared) {
  const int i = threadIdx.x;
  const bool active = 2 * i < kDim;
  float2 x{0, 0};
  if (active) x = {RoundBf16(pooled.x), RoundBf16(pooled.y)};
  const float sum = BlockSum256(fmaf(x.x, x.x, x.y * x.y), shared.sums);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(kDim) + p.norm_eps);
  if (active) {
    x = {RoundBf16(x.x * scale * place.weight.x), RoundBf16(x.y * scale * place.weight.y)};
    if (place.rotates) {
      x = RotatePair(x, place.angle);
      x = {RoundBf16(x.x), RoundBf16(x.y)};
    }
  }
  if constexpr (kDim == kHeadDim) {
    StoreKvPair(EncodeKvPair(x, i), i, place.entry);
  } else {
    if (active) reinterpret_cast<float2*>(shared.key)[i] = x;
    __syncthreads();
    if (i < 32) {
      const float4 v = reinterpret_cast<const float4*>(shared.key)[i];
      float key[4] = {v.x, v.y, v.z, v.w};
      RotateIndexVector<32>(key, i);
      StoreIndexKeyWarp(key, i, p.index_dtype, place.entry);
    }
    __syncthreads();
  }
}

// The channel pair whose rows this thread pools; index keys leave most threads idle (they repeat
// the last pair).
template <int kDim>
__device__ __forceinline__ int ThreadChannel() {
  return min(2 * static_cast<int>(threadIdx.x), kDim - 2);
}

// Entries of `seq` that need rows of earlier steps, of which there are two at most, then its state.
// Decodes complete the first one; written as a loop, what it keeps over the wait would spill.
template <int kDim>
__device__ void CompressSequenceC4(const CudaAttentionPrologueParams& p,
                                   const CudaCompressor& compressor, int seq,
                                   CompressorShared& shared) {
  AllowSuccessor();
  const CompressorRows<4, kDim> rows(p.batch, compressor, seq, p.slot_bytes, ThreadChannel<kDim>());
  if (p.batch.state_slots[seq] < 0) return WaitForPredecessor();
  const auto is_mine = [&](int j) {
    return 4 * j + 4 <= rows.end() && max(0, 4 * j - 4) < rows.first();
  };
  const int j = rows.first() / 4;
  rows.PrefetchApe();
  if (is_mine(j)) {
    const EntryPlace<4, kDim> place(p, compressor, seq, j);
    RowsC4<kDim> pool;
    pool.Load(rows, j, false);
    WaitForPredecessor();
    pool.Load(rows, j, true);
    FinishEntry(p, place, PoolC4(pool), shared);
  } else {
    WaitForPredecessor();
  }
  if (is_mine(j + 1)) {
    RowsC4<kDim> pool;
    pool.Load(rows, j + 1, false);
    pool.Load(rows, j + 1, true);
    FinishEntry(p, EntryPlace<4, kDim>(p, compressor, seq, j + 1), PoolC4(pool), shared);
  }
  if (2 * threadIdx.x < kDim) rows.WriteRing();
}

__device__ inline void CompressSequenceC128(const CudaAttentionPrologueParams& p, int seq,
                                            CompressorShared& shared) {
  AllowSuccessor();
  const CompressorRows<128, kHeadDim> rows(p.batch, p.main, seq, p.slot_bytes,
                                           ThreadChannel<kHeadDim>());
  const int first = rows.first(), end = rows.end();
  if (p.batch.state_slots[seq] < 0 || first == end) return WaitForPredecessor();
  const int merged = first == 0 ? 0 : *rows.merged_end();
  const int j = first / 128;
  const bool completes = first % 128 != 0 && end >= 128 * j + 128;
  const int target = max(merged, end - kCompressorMaxRollback), begin = target / 128 * 128;
  const auto advance = [&] {
    RunningPair sum;
    if (merged > begin) sum.Read(rows);
    sum.Merge(rows, max(merged, begin), target);
    sum.Write(rows);
  };
  // Of decodes nearly all of it is older than the predecessor.
  const bool is_old = !completes && target <= first;
  rows.PrefetchApe();
  if (is_old) advance();
  WaitForPredecessor();
  if (completes) {
    RunningPair sum;
    if (merged > 128 * j) sum.Read(rows);
    sum.Merge(rows, max(merged, 128 * j), 128 * j + 128);
    FinishEntry(p, EntryPlace<128, kHeadDim>(p, p.main, seq, j), sum.Pool(), shared);
  }
  if (!is_old) advance();
  rows.WriteRing();
  __syncthreads();  // all have read the old one
  if (threadIdx.x == 0) *rows.merged_end() = target;
}

// The entry that token t completes, if it needs this step's rows only.
template <int kRatio, int kDim>
__device__ void FinishFresh(const CudaAttentionPrologueParams& p, const CudaCompressor& compressor,
                            int t, CompressorShared& shared) {
  const int seq = p.batch.token_seq[t], j = p.batch.positions[t] / kRatio;
  const CompressorRows<kRatio, kDim> rows(p.batch, compressor, seq, p.slot_bytes,
                                          ThreadChannel<kDim>());
  if (max(0, kRatio == 4 ? 4 * j - 4 : 128 * j) < rows.first()) return;
  float2 pooled;
  if constexpr (kRatio == 4) {
    RowsC4<kDim> pool;
    pool.LoadFresh(rows, j);
    pooled = PoolC4(pool);
  } else {
    RunningPair sum;
    sum.MergeFresh(rows, 128 * j);
    pooled = sum.Pool();
  }
  FinishEntry(p, EntryPlace<kRatio, kDim>(p, compressor, seq, j), pooled, shared);
}

// Entries completed by tokens [kRatio * group, kRatio * group + kRatio) of the step that need this
// step's rows only.
template <int kRatio, int kDim>
__device__ void CompressFresh(const CudaAttentionPrologueParams& p,
                              const CudaCompressor& compressor, int group,
                              CompressorShared& shared) {
  AllowSuccessor();
  // The tokens that complete an entry, found by a thread each.
  const int mine = kRatio * group + static_cast<int>(threadIdx.x);
  const bool candidate = threadIdx.x < kRatio && mine < p.batch.num_tokens &&
                         p.batch.token_seq[mine] >= 0 &&
                         p.batch.positions[mine] % kRatio == kRatio - 1;
  const uint32_t found = __ballot_sync(0xffffffffu, candidate);
  if (threadIdx.x % 32 == 0) shared.found[threadIdx.x / 32] = found;
  WaitForPredecessor();
  __syncthreads();
  for (int word = 0; word < (kRatio + 31) / 32; ++word) {
    for (uint32_t left = shared.found[word]; left != 0; left &= left - 1) {
      FinishFresh<kRatio, kDim>(p, compressor, kRatio * group + word * 32 + __ffs(left) - 1,
                                shared);
    }
  }
}

}  // namespace fathom::kernels
