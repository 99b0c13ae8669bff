#include "comm/roster.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "comm/byte_codec.h"
#include "comm/socket.h"

namespace fathom::comm {
namespace {

constexpr size_t kMaxNameBytes = 1024;
constexpr size_t kMaxValueBytes = 4096;
constexpr size_t kMaxAgreements = 128;

const std::string* Find(const std::vector<Agreement>& agreements, const std::string& name) {
  const auto found = std::find_if(agreements.begin(), agreements.end(),
                                  [&](const Agreement& one) { return one.name == name; });
  return found == agreements.end() ? nullptr : &found->value;
}

std::string Show(const std::string* value) { return value == nullptr ? "not set" : *value; }

}  // namespace

JoinRequest MakeJoinRequest(const JoinOptions& options, int data_port) {
  JoinRequest request{.num_nodes = options.num_nodes,
                      .node_rank = options.node_rank,
                      .num_local_ranks = options.num_local_ranks,
                      .data_port = data_port,
                      .host_name = HostName(),
                      .agreements = {{"the version", FATHOM_VERSION}}};
  request.agreements.insert(request.agreements.end(), options.agreements.begin(),
                            options.agreements.end());
  request.agreements.push_back(
      {"the product of the parallel sizes", std::to_string(options.world_size)});
  return request;
}

std::string Encode(const JoinRequest& request) {
  ByteWriter out;
  out.Put(static_cast<int32_t>(request.num_nodes));
  out.Put(static_cast<int32_t>(request.node_rank));
  out.Put(static_cast<int32_t>(request.num_local_ranks));
  out.Put(static_cast<int32_t>(request.data_port));
  out.PutString(request.host_name);
  out.Put(static_cast<uint32_t>(request.agreements.size()));
  for (const Agreement& agreement : request.agreements) {
    out.PutString(agreement.name);
    out.PutString(agreement.value);
  }
  return out.Take();
}

std::string Encode(const Roster& roster) {
  ByteWriter out;
  out.PutString(roster.session_id);
  out.Put(static_cast<uint32_t>(roster.nodes.size()));
  for (const Roster::Node& node : roster.nodes) {
    out.PutString(node.host_name);
    out.PutString(node.address);
    out.Put(static_cast<int32_t>(node.data_port));
    out.Put(static_cast<int32_t>(node.num_ranks));
  }
  return out.Take();
}

Result<JoinRequest> DecodeJoinRequest(std::string_view bytes) {
  ByteReader in(bytes);
  JoinRequest request;
  request.num_nodes = in.Get<int32_t>();
  request.node_rank = in.Get<int32_t>();
  request.num_local_ranks = in.Get<int32_t>();
  request.data_port = in.Get<int32_t>();
  request.host_name = in.GetString(kMaxNameBytes);
  const auto count = in.Get<uint32_t>();
  bool ok = count <= kMaxAgreements;
  for (uint32_t i = 0; i < count && ok && in.ok(); ++i) {
    std::string name = in.GetString(kMaxNameBytes);
    request.agreements.push_back({std::move(name), in.GetString(kMaxValueBytes)});
  }
  ok = ok && in.AtEnd() && request.num_nodes >= 1 && request.num_nodes <= kMaxNodes &&
       request.node_rank >= 0 && request.node_rank < kMaxNodes && request.num_local_ranks >= 1 &&
       request.num_local_ranks <= kMaxRanks && request.data_port >= 1 &&
       request.data_port <= UINT16_MAX;
  if (!ok) return PeerError("it introduces itself in a way this build does not understand");
  return request;
}

Result<Roster> DecodeRoster(std::string_view bytes) {
  ByteReader in(bytes);
  Roster roster;
  roster.session_id = in.GetString(kMaxNameBytes);
  const auto count = in.Get<uint32_t>();
  int num_ranks = 0;
  bool ok = count >= 1 && count <= static_cast<uint32_t>(kMaxNodes);
  for (uint32_t i = 0; i < count && ok; ++i) {
    Roster::Node node;
    node.host_name = in.GetString(kMaxNameBytes);
    node.address = in.GetString(kMaxNameBytes);
    node.data_port = in.Get<int32_t>();
    node.num_ranks = in.Get<int32_t>();
    ok = in.ok() && node.data_port >= 1 && node.data_port <= UINT16_MAX && node.num_ranks >= 1 &&
         node.num_ranks <= kMaxRanks && (num_ranks += node.num_ranks) <= kMaxRanks;
    roster.nodes.push_back(std::move(node));
  }
  if (!ok || !in.AtEnd()) {
    return PeerError("it names the nodes in a way this build does not understand");
  }
  return roster;
}

std::string NodeName(int node_rank, const std::string& host_name) {
  return fmt::format("node {} ({})", node_rank, host_name);
}

std::string FindDifference(const JoinRequest& own, const JoinRequest& theirs) {
  const std::string own_name = NodeName(own.node_rank, own.host_name);
  const std::string their_name = NodeName(theirs.node_rank, theirs.host_name);
  if (theirs.num_nodes != own.num_nodes) {
    return fmt::format("--nnodes is {} on {} and {} on {}", theirs.num_nodes, their_name,
                       own.num_nodes, own_name);
  }
  if (theirs.node_rank == own.node_rank || theirs.node_rank >= own.num_nodes) {
    return fmt::format("--node-rank is {} on {}; expected 1 to {}, each once, beside {}",
                       theirs.node_rank, theirs.host_name, own.num_nodes - 1, own_name);
  }
  std::vector<Agreement> all = own.agreements;
  all.insert(all.end(), theirs.agreements.begin(), theirs.agreements.end());
  for (const Agreement& one : all) {
    const std::string* ours = Find(own.agreements, one.name);
    const std::string* other = Find(theirs.agreements, one.name);
    if (ours != nullptr && other != nullptr && *ours == *other) continue;
    return fmt::format("{} is {} on {} and {} on {}; it must be the same everywhere", one.name,
                       Show(other), their_name, Show(ours), own_name);
  }
  return "";
}

}  // namespace fathom::comm
