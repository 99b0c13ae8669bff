// JoinNodes: this process among those that serve the model together: where it stands by flags or
// launcher, what all must agree on, and the meeting itself (comm/node_group.h). One process: its
// ranks are threads. Called once, by the main thread, before weights are read.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "apps/fathom/serve_options.h"
#include "base/status.h"
#include "comm/node_group.h"

namespace fathom::app {

struct JoinedNodes {
  std::unique_ptr<comm::NodeGroup> group;  // null: one rank, which has nobody to talk to
  int num_local_ranks = 1;
  std::optional<int>
      local_device;  // of the only rank, where a launcher started one for each device
};

// `model`: a name of the model's config, the same on all hosts. kInvalidArgument: the layout does
// not go with the number of nodes, or there is no secret; else as NodeGroup::Join.
Result<JoinedNodes> JoinNodes(const ModelOptions& options, const std::string& model);

}  // namespace fathom::app
