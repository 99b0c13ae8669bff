// What a GPU's memory surely lacks for serving, as far as the config tells: said before weights are
// read, which takes minutes.
#pragma once

#include "apps/fathom/model_session.h"
#include "apps/fathom/serve_options.h"
#include "base/status.h"

namespace fathom::app {

// `session`: devices and config. kOutOfMemory: weights and workspace leave too little of what
// --gpu-memory-utilization allows for the least KV cache. What is not sure is seen when the weights
// are there: other nodes' GPUs, and what is guessed of this one's.
Status CheckKvRoom(const ModelOptions& options, const ModelSession& session);

}  // namespace fathom::app
