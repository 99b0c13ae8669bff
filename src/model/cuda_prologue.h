// The parameters of attention's prologue: what lies between a layer's products that read h and
// those of its query rows.
#pragma once

#include "kernels/attention_prologue/attention_prologue_cuda.h"
#include "model/cuda_layers.h"
#include "model/layer_cache.h"

namespace fathom::model {

// The share's query rows go to `qr`; entries are written of all tokens.
kernels::CudaAttentionPrologueParams PrologueParams(const CudaContext& context,
                                                    const CudaLayer& layer, const LayerCache& cache,
                                                    const kernels::Fp8Tiles& qr);

}  // namespace fathom::model
