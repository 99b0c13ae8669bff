// Rendezvous: how the nodes meet. Node 0 listens at the master address and takes in the others, who
// try to reach it until they do. When all are there and agree, each gets the roster; else all get
// the line that says what is wrong, and so does the log of each. One thread.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "comm/node_group.h"
#include "comm/roster.h"
#include "comm/socket.h"
#include "comm/star_link.h"

namespace fathom::comm {

struct Meeting {
  Roster roster;
  std::vector<StarPeer> peers;  // node 0: all others; others: node 0
  Socket listener;              // where this node takes data connections
};

// As NodeGroup::Join, with several nodes and valid options.
Result<Meeting> Meet(const JoinOptions& options);

}  // namespace fathom::comm
