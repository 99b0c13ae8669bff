#include "model/cuda_recording.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/float_types.h"
#include "device/cuda/cuda_check.h"

namespace fathom::model {
namespace {

void Copy(void* to, const void* from, size_t bytes, device::Stream& stream) {
  const auto check = [&](const Status& status) {
    device::CheckCuda(status, stream, __FILE__, __LINE__);
  };
  check(stream.Copy(to, from, static_cast<int64_t>(bytes)));
  check(stream.Synchronize());
}

template <typename U>
std::vector<U> Fetch(const U* from, size_t count, device::Stream& stream) {
  std::vector<U> values(count);
  Copy(values.data(), from, count * sizeof(U), stream);
  return values;
}

void Send(int32_t* to, std::span<const int32_t> values, device::Stream& stream) {
  Copy(to, values.data(), values.size_bytes(), stream);
}

}  // namespace

void CudaRecording::TakeIndex(const CudaStep& step, int layer) const {
  if (step.recorder == nullptr) return;
  ForceIndex(step, layer);
  if (!step.recorder->wants_choices()) return;
  const auto tokens = static_cast<size_t>(step.batch.num_tokens);
  const auto counts = Fetch(ws_.num_selected, tokens, *step.stream);
  const auto topk = static_cast<size_t>(c_.index_topk);
  auto selected = Fetch(ws_.selected, tokens * topk, *step.stream);
  for (size_t t = 0; t < tokens; ++t) {
    const std::span<int32_t> entries(selected.data() + t * topk, static_cast<size_t>(counts[t]));
    std::sort(entries.begin(), entries.end());
    step.recorder->OnIndex(layer, static_cast<int>(t), entries);
  }
}

void CudaRecording::ForceIndex(const CudaStep& step, int layer) const {
  const std::span<const int32_t> forced = step.recorder->ForcedIndex(layer);
  if (forced.empty()) return;
  const auto topk = static_cast<size_t>(c_.index_topk);
  CHECK_EQ(forced.size(), static_cast<size_t>(step.batch.num_tokens) * topk);
  std::vector<int32_t> counts;
  for (size_t begin = 0; begin < forced.size(); begin += topk) {
    const auto row = forced.subspan(begin, topk);
    counts.push_back(static_cast<int32_t>(std::find(row.begin(), row.end(), -1) - row.begin()));
  }
  Send(ws_.selected, forced, *step.stream);
  Send(ws_.num_selected, counts, *step.stream);
}

// Forced experts are a hash layer's table: token t of the step is its row t. The index selection's
// memory is free by now.
void CudaRecording::ForceRouting(const CudaStep& step, int layer,
                                 kernels::CudaMoeRouteParams& route) const {
  if (step.recorder == nullptr) return;
  const std::span<const int32_t> forced = step.recorder->ForcedRouting(layer);
  if (forced.empty()) return;
  CHECK_EQ(forced.size(), static_cast<size_t>(route.num_tokens * route.num_chosen));
  std::vector<int32_t> rows(static_cast<size_t>(route.num_tokens));
  std::iota(rows.begin(), rows.end(), 0);
  Send(ws_.num_selected, rows, *step.stream);
  Send(ws_.selected, forced, *step.stream);
  route.bias = nullptr;
  route.tid2eid = ws_.selected;
  route.token_ids = ws_.num_selected;
}

void CudaRecording::TellRouting(const CudaStep& step, int layer, const int32_t* expert_ids) const {
  if (step.recorder == nullptr || !step.recorder->wants_choices()) return;
  const auto k = static_cast<size_t>(c_.num_experts_per_token);
  const auto tokens = static_cast<size_t>(step.batch.num_tokens);
  const auto ids = Fetch(expert_ids, tokens * k, *step.stream);
  for (size_t t = 0; t < tokens; ++t) {
    step.recorder->OnRouting(layer, static_cast<int>(t), {ids.data() + t * k, k});
  }
}

bool CudaRecording::TakeStreams(const CudaStep& step, int layer) const {
  if (step.recorder == nullptr || !step.recorder->wants_streams()) return false;
  const size_t count =
      static_cast<size_t>(step.batch.num_tokens) * 4 * static_cast<size_t>(c_.hidden_size);
  const auto streams = Fetch(reinterpret_cast<const BFloat16*>(ws_.streams), count, *step.stream);
  step.recorder->OnStreams(layer, std::as_bytes(std::span(streams)));
  const std::span<const std::byte> forced = step.recorder->ForcedStreams(layer);
  if (forced.empty()) return false;
  CHECK_EQ(forced.size(), count * sizeof(BFloat16));
  Copy(ws_.streams, forced.data(), forced.size(), *step.stream);
  return true;
}

}  // namespace fathom::model
