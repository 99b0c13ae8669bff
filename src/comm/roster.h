// What nodes tell each other when they meet: each other node's JoinRequest to node 0, and node 0's
// Roster back. Values; decoding takes any bytes and is bounded.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "comm/node_group.h"

namespace fathom::comm {

inline constexpr int kMaxNodes = 1024;
inline constexpr int kMaxRanks = 4096;
inline constexpr size_t kMaxMeetingBytes = size_t{1} << 20;  // of one of these, encoded

struct JoinRequest {
  int num_nodes = 0;
  int node_rank = 0;
  int num_local_ranks = 0;
  int data_port = 0;
  std::string host_name;
  std::vector<Agreement> agreements;
};

struct Roster {
  struct Node {
    std::string host_name;
    std::string address;  // empty for node 0: the one that the others already know
    int data_port = 0;
    int num_ranks = 0;
  };
  std::string session_id;
  std::vector<Node> nodes;
};

// Of this node. What all agree on is the version of this build, the options' agreements and their
// world size.
JoinRequest MakeJoinRequest(const JoinOptions& options, int data_port);

std::string Encode(const JoinRequest& request);
std::string Encode(const Roster& roster);
// kPeer: not what Encode gives.
Result<JoinRequest> DecodeJoinRequest(std::string_view bytes);
Result<Roster> DecodeRoster(std::string_view bytes);

// "node 1 (gpu-b)"
std::string NodeName(int node_rank, const std::string& host_name);

// How `theirs` contradicts node 0's own, in one line; empty if it does not. What is theirs alone
// (node rank, ranks, host, port) is not compared.
std::string FindDifference(const JoinRequest& own, const JoinRequest& theirs);

}  // namespace fathom::comm
