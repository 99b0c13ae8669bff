#include "base/check.h"
#include "kernels/embedding/embedding.h"

namespace fathom::kernels {

template <typename T>
void Launch(const EmbeddingParams<T>& p, device::Stream& stream) {
  CHECK(p.table.dtype == WeightDType::kBF16);
  const int64_t hidden = p.table.cols;
  const auto* table = reinterpret_cast<const BFloat16*>(p.table.data);
  stream.thread_pool().ParallelFor(p.num_tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      CHECK_LT(static_cast<uint32_t>(p.token_ids[t]), p.table.rows);
      const BFloat16* row = table + p.token_ids[t] * hidden;
      for (int s = 0; s < p.num_streams; ++s) {
        T* out = p.streams + (t * p.num_streams + s) * hidden;
        for (int64_t i = 0; i < hidden; ++i) out[i] = FromFloat<T>(ToFloat(row[i]));
      }
    }
  });
}

template void Launch(const EmbeddingParams<BFloat16>&, device::Stream&);
template void Launch(const EmbeddingParams<float>&, device::Stream&);

}  // namespace fathom::kernels
