// RankMesh: after the nodes have met, the TCP connections between ranks of different nodes. A node
// connects to those before it, in their order, then takes the connections of those after it, so
// that nobody waits in a circle. One thread.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "comm/group_state.h"
#include "comm/roster.h"
#include "comm/socket.h"

namespace fathom::comm {

struct RankMesh {
  int first_local = 0;
  std::vector<std::string> rank_names;       // "rank 3 (node 1, gpu-b)"
  std::vector<std::vector<Socket>> sockets;  // [local rank][rank]; closed to ranks of its own node
};

// `secret`: of this session. kPeer: a connection cannot be made within 30 s; the group's own reason
// once it has ended.
Result<RankMesh> ConnectRanks(const Roster& roster, int node_rank, const Socket& listener,
                              const std::string& secret, const GroupState& state);

}  // namespace fathom::comm
