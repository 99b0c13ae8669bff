#include "base/check.h"
#include "kernels/gemm/gemm_rows.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace fathom::kernels {
namespace {

template <typename T>
void StoreToken(const WindowStoreParams<T>& p, size_t t) {
  float values[kMaxEntrySize];
  T* kv = p.kv + static_cast<int64_t>(t) * p.head_dim;
  WidenRow(kv, values, p.head_dim);
  alignas(16) std::byte data[kMaxEntrySize * 4], scales[64];
  EntrySlot slot{data, scales};
  const int32_t seq = p.batch.token_seq[t];
  const int32_t position = p.batch.positions[t];
  // A step after a full rollback begins at end - max_rollback and sees window - 1 positions
  // before that.
  const int32_t oldest = p.batch.end(seq) - p.max_rollback - (p.window - 1);
  const int32_t page =
      position / p.pages.entries_per_page - p.batch.first_window_page[static_cast<size_t>(seq)];
  if (position >= oldest && page >= 0) {
    CHECK_LT(page, p.batch.max_window_pages);
    const int32_t id =
        p.batch.window_tables[static_cast<size_t>(seq * p.batch.max_window_pages + page)];
    CHECK_GE(id, 0);
    slot = p.pages.At(id, position % p.pages.entries_per_page);
  }
  StoreKvEntry<T>(values, p.head_dim, p.rope_dim, slot);
  LoadKvEntry<T>(slot, p.head_dim, p.rope_dim, values);
  for (int i = 0; i < p.head_dim; ++i) kv[i] = FromFloat<T>(values[i]);
}

}  // namespace

template <typename T>
void Launch(const WindowStoreParams<T>& p, device::Stream& stream) {
  CHECK_LE(p.head_dim, kMaxEntrySize);
  stream.thread_pool().ParallelFor(p.batch.num_tokens(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) StoreToken(p, static_cast<size_t>(t));
  });
}

template void Launch(const WindowStoreParams<BFloat16>&, device::Stream&);
template void Launch(const WindowStoreParams<float>&, device::Stream&);

}  // namespace fathom::kernels
