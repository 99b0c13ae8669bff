// RunFollower: what a node other than node 0 does: its ranks run the steps that node 0's engine
// plans, and what they sampled for a data rank goes back there.
#pragma once

#include <vector>

#include "base/status.h"
#include "comm/node_group.h"
#include "engine/make_engine.h"

namespace fathom::engine {

// Follows until node 0 ends in order (OK), or the group ends. `options` are node 0's, `ranks` this
// node's. kOutOfMemory as MakeEngine; kPeer: another node has gone or failed, with its reason; else
// what went wrong here, which the others are told.
Status RunFollower(const EngineOptions& options, const std::vector<EngineRank>& ranks,
                   comm::NodeGroup& nodes);

}  // namespace fathom::engine
