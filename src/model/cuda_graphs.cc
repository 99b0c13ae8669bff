#include "model/cuda_graphs.h"

#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_fault.h"

namespace fathom::model {
namespace {

void Check(cudaError_t error) { device::CheckCuda(error, __FILE__, __LINE__); }

cudaStream_t StreamOf(const CudaStep& step) {
  return static_cast<cudaStream_t>(step.stream->native_handle());
}

}  // namespace

CudaGraphs::~CudaGraphs() {
  for (const auto& [key, entry] : entries_) cudaGraphExecDestroy(entry.graph);
}

CudaGraphs::Key CudaGraphs::KeyOf(const CudaStep& step) {
  return {.num_tokens = step.batch.num_tokens,
          .max_blocks = step.batch.max_blocks,
          .max_window_pages = step.batch.max_window_pages,
          .any_index_scoring = step.any_index_scoring,
          .sampled = step.sampled,
          .logits = step.logits,
          .blocks = step.kv.blocks,
          .window_pages = step.kv.window_pages,
          .state_slots = step.kv.state_slots};
}

// Nothing runs meanwhile: what a graph allocates must not wait for kernels that wait for ranks.
void CudaGraphs::BeginCapture(const CudaStep& step) {
  Check(cudaStreamSynchronize(StreamOf(step)));
  Check(cudaStreamBeginCapture(StreamOf(step), cudaStreamCaptureModeThreadLocal));
}

void CudaGraphs::EndCapture(const CudaStep& step, Entry& entry) {
  cudaGraph_t captured = nullptr;
  Check(cudaStreamEndCapture(StreamOf(step), &captured));
  if (captured == nullptr) return;  // the device is broken
  MakeRoom(step);
  Check(cudaGraphInstantiate(&entry.graph, captured, 0));
  Check(cudaGraphDestroy(captured));
}

void CudaGraphs::MakeRoom(const CudaStep& step) {
  if (entries_.size() <= capacity_) return;
  const auto oldest = std::min_element(
      entries_.begin(), entries_.end(),
      [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; });
  Check(cudaStreamSynchronize(StreamOf(step)));  // it may be running
  cudaGraphExecDestroy(oldest->second.graph);
  entries_.erase(oldest);
}

void CudaGraphs::Launch(const CudaStep& step, const Entry& entry) {
  if (entry.graph == nullptr) return;
  Check(cudaGraphLaunch(entry.graph, StreamOf(step)));
}

}  // namespace fathom::model
