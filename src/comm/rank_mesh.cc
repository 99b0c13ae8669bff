#include "comm/rank_mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/gate.h"

namespace fathom::comm {
namespace {

constexpr std::string_view kPurpose = "data";
constexpr Duration kPatience = std::chrono::seconds(30);
constexpr Duration kLookInterval = std::chrono::milliseconds(100);  // at the group's state

TimePoint Now() { return SystemClock().Now(); }

class Builder {
 public:
  Builder(const Roster& roster, int node_rank, const std::string& secret, const GroupState& state)
      : roster_(roster), node_rank_(node_rank), secret_(secret), state_(state) {
    for (size_t node = 0; node < roster.nodes.size(); ++node) {
      for (int i = 0; i < roster.nodes[node].num_ranks; ++i) {
        if (static_cast<int>(node) == node_rank && i == 0) mesh_.first_local = num_ranks();
        mesh_.rank_names.push_back(
            fmt::format("rank {} (node {}, {})", num_ranks(), node, roster.nodes[node].host_name));
        node_of_.push_back(static_cast<int>(node));
      }
    }
    mesh_.sockets.resize(
        static_cast<size_t>(roster.nodes[static_cast<size_t>(node_rank)].num_ranks));
    for (auto& sockets : mesh_.sockets) sockets.resize(node_of_.size());
  }

  // To the ranks of the nodes before this one.
  Status Connect() {
    for (int rank = 0; rank < mesh_.first_local; ++rank) {
      const Roster::Node& node = roster_.nodes[static_cast<size_t>(NodeOf(rank))];
      for (size_t local = 0; local < mesh_.sockets.size(); ++local) {
        RETURN_IF_ERROR(state_.error());
        const CallerIdentity identity{
            static_cast<uint32_t>(mesh_.first_local) + static_cast<uint32_t>(local),
            static_cast<uint32_t>(rank)};
        auto socket =
            Enter(node.address, node.data_port, secret_, kPurpose, identity, Now() + kPatience);
        if (!socket.ok()) return Failed(rank, socket.status().message());
        mesh_.sockets[local][static_cast<size_t>(rank)] = std::move(*socket);
      }
    }
    return OkStatus();
  }

  // From the ranks of the nodes after this one.
  Status Accept(const Socket& listener) {
    Gate gate(listener, secret_, std::string(kPurpose));
    TimePoint deadline = Now() + kPatience;
    while (const int missing = FindMissing()) {
      RETURN_IF_ERROR(state_.error());
      if (Now() >= deadline) return Failed(missing, "it did not connect");
      auto caller = gate.Next(std::min(deadline, Now() + kLookInterval));
      if (caller && Take(std::move(*caller))) deadline = Now() + kPatience;
    }
    return OkStatus();
  }

  RankMesh TakeMesh() { return std::move(mesh_); }

 private:
  int num_ranks() const { return static_cast<int>(mesh_.rank_names.size()); }
  int NodeOf(int rank) const { return node_of_[static_cast<size_t>(rank)]; }

  Status Failed(int rank, std::string_view why) const {
    return PeerError(fmt::format("node {} ({}) has no connection with {}: {}", node_rank_,
                                 roster_.nodes[static_cast<size_t>(node_rank_)].host_name,
                                 mesh_.rank_names[static_cast<size_t>(rank)], why));
  }

  // A rank of a later node that a local rank has no connection with; 0 (an earlier one) if none.
  int FindMissing() const {
    for (const auto& sockets : mesh_.sockets) {
      for (int rank = num_ranks() - 1; rank > 0 && NodeOf(rank) > node_rank_; --rank) {
        if (!sockets[static_cast<size_t>(rank)].is_open()) return rank;
      }
    }
    return 0;
  }

  bool Take(Caller caller) {
    const int64_t from = caller.identity.from,
                  local = int64_t{caller.identity.to} - mesh_.first_local;
    const bool is_known = from < num_ranks() && local >= 0 &&
                          local < static_cast<int64_t>(mesh_.sockets.size()) &&
                          NodeOf(static_cast<int>(from)) > node_rank_;
    if (!is_known) return false;
    mesh_.sockets[static_cast<size_t>(local)][static_cast<size_t>(from)] = std::move(caller.socket);
    return true;
  }

  const Roster& roster_;
  const int node_rank_;
  const std::string& secret_;
  const GroupState& state_;
  std::vector<int> node_of_;  // by rank
  RankMesh mesh_;
};

}  // namespace

Result<RankMesh> ConnectRanks(const Roster& roster, int node_rank, const Socket& listener,
                              const std::string& secret, const GroupState& state) {
  Builder builder(roster, node_rank, secret, state);
  RETURN_IF_ERROR(builder.Connect());
  RETURN_IF_ERROR(builder.Accept(listener));
  return builder.TakeMesh();
}

}  // namespace fathom::comm
