// A prompt's keys as BF16 rows in memory (CudaSparseAttentionParams::wide), widened once a layer by
// a launch before attention: of each sequence the compressed entries that it has by the step's end
// and its window's positions, in the places of WideRows (token_keys.cuh). Device code only.
#pragma once

#include "kernels/launch.cuh"
#include "kernels/sparse_attention/key_rows.cuh"

namespace fathom::kernels {

inline constexpr int kWidenThreads = 256;
inline constexpr int kWidenRows = kWidenThreads / 4;  // of a block at a time

// A sequence's keys: entries first, then kWindow positions before the step's, then the step's.
class SequenceKeys {
 public:
  __device__ SequenceKeys(const CudaSparseAttentionParams& p, int seq)
      : p_(p), seq_(seq), rows_(p, seq) {
    computed_ = p.batch.num_computed[seq];
    fresh_ = p.batch.cu_seqlens_q[seq];
    const int length = p.batch.cu_seqlens_q[seq + 1] - fresh_;
    entries_ = p.ratio == 0 ? 0 : (computed_ + length) / p.ratio;
    size_ = length == 0 ? 0 : entries_ + kWindow + length;
  }
  __device__ int size() const { return size_; }
  // Null for positions before the first, which no token looks at.
  __device__ KeyBytes Bytes(int k) const {
    const CudaBatch& b = p_.batch;
    if (k < entries_) {
      const int of_page = p_.compressed.entries_per_page;
      return KeyBytes::At(p_.compressed, b.block_tables[int64_t{seq_} * b.max_blocks + k / of_page],
                          k % of_page);
    }
    const int i = Behind(k);
    if (i >= 0) return KeyBytes::Fresh(p_, fresh_ + i);
    const int position = computed_ + i;
    if (position < 0 || i == -kWindow) return {};
    const int of_page = p_.pages.entries_per_page;
    const int page = position / of_page - b.first_window_page[seq_];
    return KeyBytes::At(p_.pages, b.window_tables[int64_t{seq_} * b.max_window_pages + page],
                        position % of_page);
  }
  __device__ int Row(int k) const {
    return k < entries_ ? rows_.Compressed(k) : rows_.Window(fresh_ + Behind(k));
  }

 private:
  // Positions behind those of earlier steps.
  __device__ int Behind(int k) const { return k - entries_ - kWindow; }

  const CudaSparseAttentionParams& p_;
  const int seq_;
  const WideRows rows_;
  int computed_, fresh_, entries_, size_;
};

// Grid: any; y goes over sequences.
__global__ void __launch_bounds__(kWidenThreads)
    WidenKeysKernel(const __grid_constant__ CudaSparseAttentionParams p) {
  WaitForPredecessor();
  AllowSuccessor();
  const uint32_t lane = threadIdx.x % 4;
  for (int seq = static_cast<int>(blockIdx.y); seq < p.batch.num_seqs;
       seq += static_cast<int>(gridDim.y)) {
    const SequenceKeys keys(p, seq);
    for (int k = static_cast<int>(blockIdx.x * kWidenRows + threadIdx.x / 4); k < keys.size();
         k += static_cast<int>(gridDim.x) * kWidenRows) {
      const KeyBytes bytes = keys.Bytes(k);
      if (bytes.data == nullptr) continue;
      KeyRow row;
      row.Fetch(bytes, lane);
      row.Write(reinterpret_cast<uint4*>(p.wide.rows + int64_t{keys.Row(k)} * kWideRowBytes), lane);
    }
  }
}

}  // namespace fathom::kernels
