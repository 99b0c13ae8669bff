// ControlLink: what the nodes of a group tell each other beside their ranks' exchanges: node 0's
// messages to all others, theirs to node 0, in order between any two. Node 0 is the middle of a
// star; the others do not talk to each other here.
//
// Any thread; one at a time in Receive. A thread of its own sends and reads, and a heartbeat about
// each second: a node that has gone (its connection ended) or is silent for 7 s ends the group. The
// group's end is the same for all: Broadcast, Send and Receive here and every rank's
// Transport::Exchange fail from then on with kPeer and the reason, which names the node. With one
// node there is no thread and no socket, and Receive waits for Abort or Close.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom::comm {

// Longer messages are refused where they are sent and end the group where they arrive. As much
// again may wait for a node that does not keep up.
inline constexpr size_t kMaxControlBytes = size_t{256} << 20;

struct ControlMessage {
  int node_rank = 0;  // who sent it
  std::string bytes;
};

class ControlLink {
 public:
  virtual ~ControlLink() = default;

  // Node 0 only: to all other nodes. Returns before it has arrived. kInvalidArgument: too long.
  virtual Status Broadcast(std::string_view bytes) = 0;

  // All but node 0: to node 0. As Broadcast.
  virtual Status Send(std::string_view bytes) = 0;

  // Waits for the next message; none when the group was closed in order and all messages are taken.
  virtual Result<std::optional<ControlMessage>> Receive() = 0;

  // Ends the group: everybody's calls fail from now on with this reason. The caller's node keeps
  // its code; to the others it is kPeer.
  virtual void Abort(const Status& reason) = 0;

  // Node 0: the orderly end; what was broadcast arrives, then the others' Receive gives none.
  // Others: they leave. It is in order when node 0 has closed; before that it ends the group.
  virtual void Close() = 0;
};

}  // namespace fathom::comm
