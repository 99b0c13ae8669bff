#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/compressor/compressor.h"
#include "kernels/compressor/pooling.h"
#include "kernels/indexer/index_vector.h"
#include "kernels/norm/norm.h"
#include "kernels/rope/rope.h"

namespace fathom::kernels {
namespace {

// The rows of one sequence: this step's from c and z, earlier ones from the ring in the state slot.
template <typename T>
class SequenceRows {
 public:
  SequenceRows(const CompressorParams<T>& params, int seq)
      : p_(params),
        seq_(seq),
        first_(params.batch.num_computed[static_cast<size_t>(seq)]),
        slot_(params.state +
              params.batch.state_slots[static_cast<size_t>(seq)] * params.slot_bytes) {}

  int32_t first() const { return first_; }
  int32_t end() const { return p_.batch.end(seq_); }

  // `scratch` holds 2 * width floats and is used for this step's rows.
  PoolRow Row(int32_t position, float* scratch) const {
    const int width = p_.width();
    if (position < first_) {
      const float* row = RingRow(position);
      return {row, row + width};
    }
    const int64_t offset = int64_t{p_.batch.row(seq_, position)} * width;
    const float* ape = p_.ape + position % p_.ratio * width;
    for (int i = 0; i < width; ++i) scratch[i] = p_.z[offset + i] + ape[i];
    return {p_.c + offset, scratch};
  }

  // Keeps this step's last rows for later steps.
  void WriteRing() const {
    const int width = p_.width();
    for (int32_t position = std::max(first_, end() - p_.ring_rows); position < end(); ++position) {
      float z[2 * kMaxEntrySize];
      const PoolRow row = Row(position, z);
      float* out = RingRow(position);
      std::copy(row.c, row.c + width, out);
      std::copy(row.z, row.z + width, out + width);
    }
  }

  // C128: the running softmax of the group that merged_end() is in.
  int32_t merged_end() const {
    int32_t merged;
    std::memcpy(&merged, slot_, sizeof(merged));
    if (first_ == 0) return 0;
    CHECK_LE(merged, first_);  // a rollback by more than max_rollback
    return merged;
  }
  void set_merged_end(int32_t merged) const { std::memcpy(slot_, &merged, sizeof(merged)); }
  OnlineSoftmax stored() const {
    auto* floats = reinterpret_cast<float*>(slot_ + kC128StateHeaderBytes);
    return {floats, floats + p_.dim, floats + 2 * p_.dim};
  }

 private:
  float* RingRow(int32_t position) const {
    auto* rows = reinterpret_cast<float*>(slot_);
    if (p_.ratio == 128) rows = stored().acc + p_.dim;
    return rows + position % p_.ring_rows * 2 * p_.width();
  }

  const CompressorParams<T>& p_;
  int seq_;
  int32_t first_;
  std::byte* slot_;
};

template <typename T>
void PoolC4(const CompressorParams<T>& p, const SequenceRows<T>& rows, int32_t entry,
            float* pooled) {
  float scratch[8][2 * kMaxEntrySize];
  PoolRow pool[8];
  int n = 0;
  for (int32_t position = std::max(0, 4 * entry - 4); position < 4 * entry + 4; ++position, ++n) {
    pool[n] = rows.Row(position, scratch[n]);
    if (position >= 4 * entry) {
      pool[n].c += p.dim;
      pool[n].z += p.dim;
    }
  }
  PoolSoftmax(pool, n, p.dim, pooled);
}

// Merges [from, to) of one group into `sum`, which holds the tokens of the group before `from`.
template <typename T>
void MergeRows(const CompressorParams<T>& p, const SequenceRows<T>& rows, int32_t from, int32_t to,
               OnlineSoftmax& sum) {
  float z[kMaxEntrySize];
  for (int32_t position = from; position < to; ++position) sum.Merge(rows.Row(position, z), p.dim);
}

template <typename T>
void PoolC128(const CompressorParams<T>& p, const SequenceRows<T>& rows, int32_t entry,
              float* pooled) {
  float m[kMaxEntrySize], l[kMaxEntrySize], acc[kMaxEntrySize];
  OnlineSoftmax sum{m, l, acc};
  const int32_t begin = 128 * entry;
  int32_t from = begin;
  if (rows.merged_end() > begin) {
    const OnlineSoftmax stored = rows.stored();
    std::copy(stored.m, stored.m + p.dim, m);
    std::copy(stored.l, stored.l + p.dim, l);
    std::copy(stored.acc, stored.acc + p.dim, acc);
    from = rows.merged_end();
  } else {
    sum.Clear(p.dim);
  }
  MergeRows(p, rows, from, begin + 128, sum);
  for (int i = 0; i < p.dim; ++i) pooled[i] = acc[i] / l[i];
}

// Moves the stored softmax forward to the last token that no rollback can take back.
template <typename T>
void AdvanceC128(const CompressorParams<T>& p, const SequenceRows<T>& rows) {
  const int32_t merged = rows.merged_end();
  const int32_t target = std::max(merged, rows.end() - p.max_rollback);
  const int32_t begin = target / 128 * 128;
  OnlineSoftmax stored = rows.stored();
  int32_t from = merged;
  if (merged <= begin) {
    stored.Clear(p.dim);
    from = begin;
  }
  MergeRows(p, rows, from, target, stored);
  rows.set_merged_end(target);
}

// b() -> RMSNorm -> b() -> rope -> b() -> stored.
template <typename T>
void FinishEntry(const CompressorParams<T>& p, const CompressedEntry& e, const float* pooled) {
  T rounded[kMaxEntrySize];
  for (int i = 0; i < p.dim; ++i) rounded[i] = FromFloat<T>(pooled[i]);
  RmsNormRow(rounded, p.norm_weight, p.norm_eps, p.dim, rounded);
  float values[kMaxEntrySize], angles[kMaxEntrySize];
  for (int i = 0; i < p.dim; ++i) values[i] = ToFloat(rounded[i]);
  RopeAngles(int64_t{p.ratio} * e.entry, p.frequencies, angles);
  float* tail = values + p.dim - p.rope_dim;
  RotateRow(tail, angles, p.rope_dim, false);
  for (int i = 0; i < p.rope_dim; ++i) tail[i] = Round<T>(tail[i]);

  const int page = e.entry / p.cache.entries_per_page;
  const int32_t block =
      p.batch.block_tables[static_cast<size_t>(e.seq * p.batch.max_blocks + page)];
  CHECK_GE(block, 0);
  const EntrySlot slot = p.cache.At(block, e.entry % p.cache.entries_per_page);
  if (p.output == CompressorOutput::kKvEntry) {
    StoreKvEntry<T>(values, p.dim, p.rope_dim, slot);
  } else {
    RotateIndexVector<T>(values, p.dim);
    StoreIndexKey(values, p.dim, p.index_dtype, slot);
  }
}

}  // namespace

int PlanCompressedEntries(const BatchView& batch, int ratio, std::span<CompressedEntry> out) {
  size_t n = 0;
  for (int s = 0; s < batch.num_seqs(); ++s) {
    const int32_t end = batch.end(s) / ratio;
    for (int32_t j = batch.num_computed[static_cast<size_t>(s)] / ratio; j < end; ++j) {
      out[n++] = {s, j};
    }
  }
  return static_cast<int>(n);
}

template <typename T>
void Launch(const CompressorParams<T>& p, device::Stream& stream) {
  CHECK_LE(p.dim, kMaxEntrySize);
  ThreadPool& pool = stream.thread_pool();
  const auto num_entries = static_cast<int64_t>(p.entries.size());
  pool.ParallelFor(num_entries, p.ratio == 4 ? 4 : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const CompressedEntry& e = p.entries[static_cast<size_t>(i)];
      float pooled[kMaxEntrySize];
      const SequenceRows<T> rows(p, e.seq);
      if (p.ratio == 4) {
        PoolC4(p, rows, e.entry, pooled);
      } else {
        PoolC128(p, rows, e.entry, pooled);
      }
      FinishEntry(p, e, pooled);
    }
  });
  pool.ParallelFor(p.batch.num_seqs(), 1, [&](int64_t seq, int64_t) {
    const SequenceRows<T> rows(p, static_cast<int>(seq));
    if (p.ratio == 128) AdvanceC128(p, rows);
    rows.WriteRing();
  });
}

template void Launch(const CompressorParams<BFloat16>&, device::Stream&);
template void Launch(const CompressorParams<float>&, device::Stream&);

}  // namespace fathom::kernels
