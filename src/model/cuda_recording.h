// CudaRecording: what a recorder (model.h, ChoiceRecorder) is told of a step on a GPU, and what it
// puts in the place of the model's own. Copies between the GPU and the host, and waits for them;
// does nothing in a step without a recorder. The workspace outlives it. One thread.
#pragma once

#include "config/model_config.h"
#include "kernels/moe_route/moe_route_cuda.h"
#include "model/cuda_step.h"
#include "model/cuda_workspace.h"

namespace fathom::model {

class CudaRecording {
 public:
  CudaRecording(const config::ModelConfig& config, const CudaWorkspace& workspace)
      : c_(config), ws_(workspace) {}

  // Behind the index selection of a layer.
  void TakeIndex(const CudaStep& step, int layer) const;
  // Before the routing of a layer.
  void ForceRouting(const CudaStep& step, int layer, kernels::CudaMoeRouteParams& route) const;
  // Behind it. expert_ids: [tokens, k].
  void TellRouting(const CudaStep& step, int layer, const int32_t* expert_ids) const;
  // Tells the streams after the layer; true when the recorder puts others in their place.
  bool TakeStreams(const CudaStep& step, int layer) const;

 private:
  void ForceIndex(const CudaStep& step, int layer) const;

  const config::ModelConfig c_;
  const CudaWorkspace& ws_;
};

}  // namespace fathom::model
