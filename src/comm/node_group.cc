#include "comm/node_group.h"

#include <fmt/format.h>

#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "comm/group_state.h"
#include "comm/rank_mesh.h"
#include "comm/rank_transport.h"
#include "comm/rendezvous.h"
#include "comm/roster.h"
#include "comm/secret_proof.h"
#include "comm/star_link.h"

namespace fathom::comm {
namespace {

Status CheckOptions(const JoinOptions& options) {
  if (options.num_nodes < 1 || options.num_nodes > kMaxNodes) {
    return InvalidArgument(
        fmt::format("--nnodes is {}; expected 1 to {}", options.num_nodes, kMaxNodes));
  }
  if (options.node_rank < 0 || options.node_rank >= options.num_nodes) {
    return InvalidArgument(fmt::format("--node-rank is {}; expected 0 to {}, below --nnodes",
                                       options.node_rank, options.num_nodes - 1));
  }
  CHECK(options.num_local_ranks >= 1 && options.num_local_ranks <= kMaxRanks);
  if (options.num_nodes == 1) {
    CHECK_EQ(options.num_local_ranks, options.world_size);
    return OkStatus();
  }
  if (options.master_addr.empty()) {
    return InvalidArgument(
        "--master-addr is not set; expected the host name or address of node 0, which every node "
        "can reach");
  }
  if (options.master_port < 1 || options.master_port > 65535) {
    return InvalidArgument(
        fmt::format("--master-port is {}; expected 1 to 65535", options.master_port));
  }
  if (options.secret.empty()) {
    return InvalidArgument(
        "several nodes need a secret, the same on each, that shows who may join; none is set");
  }
  return OkStatus();
}

class JoinedGroup final : public NodeGroup {
 public:
  JoinedGroup(int node_rank, std::vector<NodeInfo> nodes,
              std::vector<std::unique_ptr<Transport>> transports, std::unique_ptr<StarLink> control)
      : node_rank_(node_rank),
        nodes_(std::move(nodes)),
        transports_(std::move(transports)),
        control_(std::move(control)) {}

  int node_rank() const override { return node_rank_; }
  const std::vector<NodeInfo>& nodes() const override { return nodes_; }
  Transport& transport(int local_idx) override {
    return *transports_[static_cast<size_t>(local_idx)];
  }
  ControlLink& control() override { return *control_; }

 private:
  const int node_rank_;
  const std::vector<NodeInfo> nodes_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::unique_ptr<StarLink> control_;  // leaves first
};

std::vector<NodeInfo> NodesOf(const Roster& roster) {
  std::vector<NodeInfo> nodes;
  int first_rank = 0;
  for (const Roster::Node& node : roster.nodes) {
    nodes.push_back({node.host_name, first_rank, node.num_ranks});
    first_rank += node.num_ranks;
  }
  return nodes;
}

std::unique_ptr<NodeGroup> MakeGroup(const JoinOptions& options, const Roster& roster,
                                     RankMesh mesh, std::shared_ptr<GroupState> state,
                                     std::unique_ptr<StarLink> control) {
  const auto world = RankWorld::Make(std::move(state), std::move(mesh.rank_names), mesh.first_local,
                                     options.num_local_ranks, options.exchange_timeout);
  std::vector<std::unique_ptr<Transport>> transports;
  for (size_t local = 0; local < mesh.sockets.size(); ++local) {
    transports.push_back(std::make_unique<RankTransport>(
        world, mesh.first_local + static_cast<int>(local), std::move(mesh.sockets[local])));
  }
  return std::make_unique<JoinedGroup>(options.node_rank, NodesOf(roster), std::move(transports),
                                       std::move(control));
}

}  // namespace

Result<std::unique_ptr<NodeGroup>> NodeGroup::Join(const JoinOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  const auto state = std::make_shared<GroupState>();
  Meeting meeting;
  if (options.num_nodes == 1) {
    meeting.roster.nodes.push_back({HostName(), "", 0, options.num_local_ranks});
  } else {
    ASSIGN_OR_RETURN(meeting, Meet(options));
  }
  const Roster& roster = meeting.roster;
  const std::string own_name =
      NodeName(options.node_rank, roster.nodes[static_cast<size_t>(options.node_rank)].host_name);
  // From here on a node that goes away is noticed, also while ranks connect.
  auto control = std::make_unique<StarLink>(
      own_name, options.node_rank == 0, std::move(meeting.peers), state, options.heartbeat_timeout);
  auto mesh = ConnectRanks(roster, options.node_rank, meeting.listener,
                           SessionSecret(options.secret, roster.session_id), *state);
  if (!mesh.ok()) {
    state->Fail(mesh.status());
    return state->error();
  }
  if (options.num_nodes > 1) {
    LogInfo("{} is in a group of {} nodes with {} ranks", own_name, options.num_nodes,
            mesh->rank_names.size());
  }
  return MakeGroup(options, roster, std::move(*mesh), state, std::move(control));
}

}  // namespace fathom::comm
