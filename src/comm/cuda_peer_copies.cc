#include "comm/cuda_peer_copies.h"

#include <utility>

#include "device/cuda/cuda_fault.h"

namespace fathom::comm {
namespace {

void Check(cudaError_t error) { device::CheckCuda(error, __FILE__, __LINE__); }

cudaStream_t Native(device::Stream& stream) {
  return static_cast<cudaStream_t>(stream.native_handle());
}

}  // namespace

PeerCopies::PeerCopies(const kernels::PeerView& view) : view_(view) {
  Check(cudaEventCreateWithFlags(&made_, cudaEventDisableTiming));
  // Not all begin with the same one.
  for (int i = 1; i < view.size; ++i) {
    Way way{.to = (view.rank + i) % view.size};
    Check(cudaStreamCreateWithFlags(&way.stream, cudaStreamNonBlocking));
    Check(cudaEventCreateWithFlags(&way.arrived, cudaEventDisableTiming));
    ways_.push_back(way);
  }
}

PeerCopies::~PeerCopies() {
  for (const Way& way : ways_) {
    cudaEventDestroy(way.arrived);
    cudaStreamDestroy(way.stream);
  }
  cudaEventDestroy(made_);
}

void PeerCopies::Begin(std::span<const kernels::GatheredMatrix> matrices, device::Stream& stream) {
  Check(cudaEventRecord(made_, Native(stream)));
  for (const Way& way : ways_) {
    Check(cudaStreamWaitEvent(way.stream, made_, 0));
    for (const kernels::GatheredMatrix& matrix : matrices) Copy(matrix, way);
    Check(cudaEventRecord(way.arrived, way.stream));
  }
  has_begun_ = true;
}

void PeerCopies::Copy(const kernels::GatheredMatrix& matrix, const Way& way) const {
  const kernels::GatheredMatrix::Part& part = matrix.of[view_.rank];
  if (part.bytes() == 0) return;
  const std::byte* const from = matrix.data + part.offset;
  std::byte* const to = view_.memory[way.to] + (from - view_.memory[view_.rank]);
  const auto pitch = static_cast<size_t>(matrix.pitch), width = static_cast<size_t>(part.width);
  Check(pitch == width
            ? cudaMemcpyAsync(to, from, static_cast<size_t>(part.bytes()), cudaMemcpyDeviceToDevice,
                              way.stream)
            : cudaMemcpy2DAsync(to, pitch, from, pitch, width, static_cast<size_t>(part.height),
                                cudaMemcpyDeviceToDevice, way.stream));
}

void PeerCopies::End(device::Stream& stream) {
  if (!std::exchange(has_begun_, false)) return;
  for (const Way& way : ways_) Check(cudaStreamWaitEvent(Native(stream), way.arrived, 0));
}

}  // namespace fathom::comm
