// CudaOperators: enqueues the operators of a step, one behind the other on its stream, and tells a
// recorder of each. `sync`: waits for each, too. One thread.
#pragma once

#include "device/device.h"
#include "model/cuda_step.h"

namespace fathom::model {

class CudaOperators {
 public:
  explicit CudaOperators(bool sync) : sync_(sync) {}

  // Whose operators are enqueued from now on.
  static constexpr int kNoLayer = -1;
  void BeginLayer(int layer) { layer_ = layer; }
  int layer() const { return layer_; }

  // What a kernels/ Launch takes before the stream. `name` is a literal.
  template <typename... Params>
  void Enqueue(const CudaStep& step, const char* name, const Params&... params) {
    EnqueueBy(step, name, [&] { Launch(params..., *step.stream); });
  }
  // The same of what `enqueue` enqueues.
  template <typename Function>
  void EnqueueBy(const CudaStep& step, const char* name, const Function& enqueue) {
    if (step.recorder != nullptr) step.recorder->OnOperator(name, layer_);
    enqueue();
    if (sync_) (void)step.stream->Synchronize();  // who waits for the step says what broke
  }

 private:
  const bool sync_;
  int layer_ = kNoLayer;
};

}  // namespace fathom::model
