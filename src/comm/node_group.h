// NodeGroup: the processes ("nodes", one a host) that serve one model together, and this node's
// place among them. Join meets the others: node 0 listens at the master address, the others connect
// to it, both sides prove that they know the secret, and node 0 compares what all must agree on.
// Then every rank is connected with every rank of another node: one TCP connection for each pair of
// ranks, so that a rank's thread reads straight into its own memory and waits for nobody else's
// messages. Ranks of one node exchange through memory. With one node there are no sockets at all.
//
// The secret says who may join and is never sent. What is exchanged afterwards is neither encrypted
// nor signed: the network between the nodes must be one that others cannot write to.
//
// Owner: the program; it outlives the workers, which use its transports. The transports and the
// control link end together: see control_link.h. The destructor leaves (ControlLink::Close).
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "comm/control_link.h"
#include "comm/transport.h"

namespace fathom::comm {

// Something that must be the same on all nodes, by the name users know: {"model", "3f9a…"},
// {"--tensor-parallel-size", "4"}, {"version", "0.1.0"}.
struct Agreement {
  std::string name;
  std::string value;
};

struct JoinOptions {
  int num_nodes = 1;
  int node_rank = 0;
  int num_local_ranks = 1;
  int world_size = 1;  // of the model's layout; all nodes' local ranks together must be as many
  // Only with several nodes:
  std::string master_addr;  // host name or address of node 0
  int master_port = 29501;
  std::string secret;  // not empty
  std::vector<Agreement> agreements;
  Duration join_timeout = std::chrono::minutes(5);  // until all nodes are there

  // How long a rank waits in an exchange in which nothing moves: longer than any rank's work
  // between two exchanges, or, of a pipeline, than the work of all stages before it.
  Duration exchange_timeout = std::chrono::seconds(8);
  // How long a node may be silent; its heartbeats come eight times as often.
  Duration heartbeat_timeout = std::chrono::seconds(7);
};

struct NodeInfo {
  std::string host_name;
  int first_rank = 0;
  int num_ranks = 0;
};

class NodeGroup {
 public:
  // kInvalidArgument: the options, or another node's differ (it says which and where; the same line
  // on all nodes). kPeer: a node did not come in time, has another secret, or went away.
  static Result<std::unique_ptr<NodeGroup>> Join(const JoinOptions& options);

  virtual ~NodeGroup() = default;

  virtual int node_rank() const = 0;
  virtual const std::vector<NodeInfo>& nodes() const = 0;  // ranks are numbered node by node
  // Rank nodes()[node_rank()].first_rank + local_idx, for that rank's thread.
  virtual Transport& transport(int local_idx) = 0;
  virtual ControlLink& control() = 0;
};

}  // namespace fathom::comm
