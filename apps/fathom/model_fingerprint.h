// ModelFingerprint: names what a KV cache on disk was computed with: weights, numerics, index keys.
// Weights are told apart by their files' names, sizes and times, not by reading them. A changed
// file gives another name, and so an empty cache; never a wrong one.
#pragma once

#include <string>

#include "apps/fathom/model_session.h"
#include "apps/fathom/serve_options.h"

namespace fathom::app {

std::string ModelFingerprint(const ModelOptions& options, const ModelSession& session);

}  // namespace fathom::app
