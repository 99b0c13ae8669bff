// For tests: several nodes as threads of one process, which meet at a free port of the loopback
// interface, and ranks spread over them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/free_port.h"
#include "comm/group.h"
#include "comm/memory_transport.h"
#include "comm/node_group.h"
#include "comm/socket.h"

namespace fathom::comm {

// Long enough for whatever comes at all.
inline TimePoint InTime() { return SystemClock().Now() + std::chrono::minutes(1); }

// The two ends of a connection.
inline std::pair<Socket, Socket> ConnectedPair() {
  const Socket listener = Listen("127.0.0.1", 0).value();
  Socket one = Connect("127.0.0.1", listener.LocalPort(), InTime()).value();
  std::vector<pollfd> waits{{listener.fd(), POLLIN, 0}};
  Poll(waits, InTime());
  return {std::move(one), Accept(listener).value()};
}

inline void OnThreads(size_t count, const std::function<void(size_t)>& body) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

using JoinResults = std::vector<Result<std::unique_ptr<NodeGroup>>>;

// Options of nodes with these numbers of ranks.
inline std::vector<JoinOptions> OptionsFor(const std::vector<int>& ranks_per_node) {
  JoinOptions options;
  options.num_nodes = static_cast<int>(ranks_per_node.size());
  options.world_size = 0;
  for (const int ranks : ranks_per_node) options.world_size += ranks;
  options.master_addr = "127.0.0.1";
  options.master_port = FreePort();
  options.secret = "only for tests";
  options.join_timeout = std::chrono::minutes(1);
  std::vector<JoinOptions> all;
  for (const int ranks : ranks_per_node) {
    options.node_rank = static_cast<int>(all.size());
    options.num_local_ranks = ranks;
    all.push_back(options);
  }
  return all;
}

inline JoinResults JoinAll(const std::vector<JoinOptions>& options) {
  JoinResults results;
  for (size_t i = 0; i < options.size(); ++i) results.push_back(InternalError("not joined"));
  OnThreads(options.size(), [&](size_t i) { results[i] = NodeGroup::Join(options[i]); });
  return results;
}

// The ranks of a world, in order, wherever they are.
class TestWorld {
 public:
  explicit TestWorld(const std::vector<JoinOptions>& options) {
    for (auto& joined : JoinAll(options)) {
      EXPECT_TRUE(joined.ok()) << joined.status().message();
      groups_.push_back(std::move(joined).value());
    }
    for (size_t node = 0; node < groups_.size(); ++node) {
      for (int i = 0; i < options[node].num_local_ranks; ++i) {
        ranks_.push_back(&groups_[node]->transport(i));
      }
    }
  }
  explicit TestWorld(const std::vector<int>& ranks_per_node)
      : TestWorld(OptionsFor(ranks_per_node)) {}

  NodeGroup& node(size_t i) { return *groups_[i]; }
  Transport& rank(size_t i) { return *ranks_[i]; }
  // Nodes leave at the same time, as processes do.
  ~TestWorld() {
    OnThreads(groups_.size(), [&](size_t i) { groups_[i] = nullptr; });
  }
  void EndNode(size_t i) { groups_[i] = nullptr; }

  // Runs body(transport) on a thread of its own for every rank.
  void OnEveryRank(const std::function<void(Transport&)>& body) {
    OnThreads(ranks_.size(), [&](size_t i) { body(*ranks_[i]); });
  }

 private:
  std::vector<std::unique_ptr<NodeGroup>> groups_;
  std::vector<Transport*> ranks_;
};

// Every rank's thousand bytes, its number, to all others of the world; again and again, `round`.
inline Status GatherOnce(Transport& transport, int round = 0) {
  constexpr int64_t kBytes = 1000;
  std::vector<int> ranks;
  std::vector<Group::Range> ranges;
  std::vector<std::byte> all(static_cast<size_t>(kBytes * transport.size()));
  const auto value = [round](int64_t rank) { return std::byte(rank + round); };
  for (int rank = 0; rank < transport.size(); ++rank) {
    ranks.push_back(rank);
    ranges.push_back({kBytes * rank, kBytes * (rank + 1)});
  }
  std::fill_n(all.begin() + kBytes * transport.rank(), kBytes, value(transport.rank()));
  RETURN_IF_ERROR(Group(transport, ranks).AllGather(all, ranges));
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i], value(static_cast<int64_t>(i) / kBytes)) << i;
  }
  return OkStatus();
}

}  // namespace fathom::comm
