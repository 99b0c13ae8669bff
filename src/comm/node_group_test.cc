#include "comm/node_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "comm/test_nodes.h"

namespace fathom::comm {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;

TEST(NodeGroup, OneNodeHasItsRanksAndNeedsNoOther) {
  JoinOptions options;
  options.num_local_ranks = options.world_size = 3;
  auto group = NodeGroup::Join(options).value();
  ASSERT_EQ(group->nodes().size(), 1U);
  EXPECT_EQ(group->nodes()[0].num_ranks, 3);
  OnThreads(3, [&](size_t i) {
    EXPECT_EQ(group->transport(static_cast<int>(i)).rank(), static_cast<int>(i));
    EXPECT_TRUE(GatherOnce(group->transport(static_cast<int>(i))).ok());
  });
  EXPECT_TRUE(group->control().Broadcast("to nobody").ok());
  group->control().Close();
  EXPECT_FALSE(group->control().Receive().value().has_value());
}

TEST(NodeGroup, RanksAreNumberedNodeByNode) {
  TestWorld world({2, 1, 3});
  for (size_t node = 0; node < 3; ++node) {
    EXPECT_EQ(world.node(node).node_rank(), static_cast<int>(node));
    EXPECT_EQ(world.node(node).nodes()[2].first_rank, 3);
    EXPECT_EQ(world.node(node).nodes()[2].num_ranks, 3);
  }
  for (size_t rank = 0; rank < 6; ++rank) {
    EXPECT_EQ(world.rank(rank).rank(), static_cast<int>(rank));
    EXPECT_EQ(world.rank(rank).size(), 6);
  }
}

TEST(NodeGroup, BroadcastsArriveInOrderAndAnswersNameTheirNode) {
  TestWorld world({1, 1, 1});
  constexpr int kCount = 1000;
  OnThreads(3, [&](size_t node) {
    ControlLink& control = world.node(node).control();
    if (node == 0) {
      for (int i = 0; i < kCount; ++i) ASSERT_TRUE(control.Broadcast(std::to_string(i)).ok());
      std::vector<int> sums(3);
      for (int i = 0; i < 2 * kCount; ++i) {
        const auto message = control.Receive().value();
        ASSERT_EQ(message->bytes, std::to_string(sums[static_cast<size_t>(message->node_rank)]++));
      }
      return;
    }
    for (int i = 0; i < kCount; ++i) {
      const auto message = control.Receive().value();
      ASSERT_EQ(message->bytes, std::to_string(i));
      ASSERT_EQ(message->node_rank, 0);
      ASSERT_TRUE(control.Send(message->bytes).ok());
    }
  });
}

TEST(NodeGroup, ALongMessageArrivesWholeAndALongerOneIsRefused) {
  TestWorld world({1, 1});
  std::string bytes(size_t{20} << 20, 'x');
  bytes.back() = 'y';
  ASSERT_TRUE(world.node(0).control().Broadcast(bytes).ok());
  EXPECT_EQ(world.node(1).control().Receive().value()->bytes, bytes);
  const Status status = world.node(0).control().Broadcast(std::string(kMaxControlBytes + 1, 'x'));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(world.node(0).control().Broadcast("and the group goes on").ok());
}

TEST(NodeGroup, CloseDeliversWhatWasSentAndIsNoFailure) {
  TestWorld world({1, 1, 1});
  OnThreads(3, [&](size_t node) {
    ControlLink& control = world.node(node).control();
    if (node == 0) {
      EXPECT_TRUE(control.Broadcast("last").ok());
      control.Close();
      EXPECT_FALSE(control.Broadcast("too late").ok());
    } else {
      EXPECT_EQ(control.Receive().value()->bytes, "last");
    }
    const auto end = control.Receive();
    ASSERT_TRUE(end.ok()) << end.status().message();
    EXPECT_FALSE(end->has_value());
  });
}

TEST(NodeGroup, ANodeThatLeavesEarlyEndsTheGroupAndIsNamed) {
  TestWorld world({1, 1, 1});
  world.EndNode(1);
  for (const size_t node : {0, 2}) {
    const auto message = world.node(node).control().Receive();
    EXPECT_EQ(message.status().code(), StatusCode::kPeer);
    EXPECT_THAT(message.status().message(), AllOf(HasSubstr("node 1 ("), HasSubstr("has left")));
    EXPECT_EQ(world.rank(node).Exchange({}, {}).code(), StatusCode::kPeer);
  }
}

TEST(NodeGroup, AnAbortReachesEveryCallOfEveryNodeWithItsReason) {
  TestWorld world({1, 2, 1});
  OnThreads(3, [&](size_t node) {
    if (node == 2) {
      std::this_thread::sleep_for(milliseconds(30));
      world.rank(3).Abort(DeviceError("GPU 1 fell off the bus"));
      EXPECT_EQ(world.node(2).control().Receive().status().code(), StatusCode::kDevice);
    } else if (node == 1) {
      OnThreads(2, [&](size_t i) {
        const Status status = GatherOnce(world.rank(1 + i));
        EXPECT_EQ(status.code(), StatusCode::kPeer);
        EXPECT_THAT(status.message(), AllOf(HasSubstr("node 2"), HasSubstr("fell off the bus")));
      });
    } else {
      const auto message = world.node(0).control().Receive();
      EXPECT_EQ(message.status().code(), StatusCode::kPeer);
      EXPECT_THAT(message.status().message(), HasSubstr("fell off the bus"));
    }
  });
}

TEST(NodeGroup, ARankThatDoesNotComeToAnExchangeEndsTheGroupInTime) {
  auto options = OptionsFor({1, 1});
  for (JoinOptions& one : options) one.exchange_timeout = milliseconds(200);
  TestWorld world(options);
  const Status status = GatherOnce(world.rank(0));
  EXPECT_EQ(status.code(), StatusCode::kPeer);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 1 (node 1"), HasSubstr("hangs")));
  const auto message = world.node(1).control().Receive();
  EXPECT_THAT(message.status().message(), HasSubstr("rank 1 (node 1"));
}

TEST(NodeGroup, MessagesOfTwoSizesEndTheGroup) {
  TestWorld world({1, 1});
  OnThreads(2, [&](size_t rank) {
    std::vector<std::byte> bytes(rank == 0 ? 8 : 12);
    const Outgoing outgoing{static_cast<int>(1 - rank), bytes};
    std::vector<std::byte> received(8);
    const Incoming incoming{static_cast<int>(1 - rank), received};
    const Status status = world.rank(rank).Exchange({&outgoing, 1}, {&incoming, 1});
    if (rank == 0) {
      EXPECT_THAT(status.message(), HasSubstr("sends 12 bytes"));
    }
  });
}

// Node 1 as a process of its own, which does `how` to itself in the middle of the exchanges; what
// node 0's next exchange says.
Status EndOfAProcess(int how, Duration heartbeat_timeout) {
  auto options = OptionsFor({1, 1});
  for (JoinOptions& one : options) {
    one.heartbeat_timeout = heartbeat_timeout;
    one.exchange_timeout = std::chrono::hours(1);
  }
  const pid_t child = fork();
  if (child == 0) {
    auto group = NodeGroup::Join(options[1]);
    if (!group.ok()) _exit(1);
    for (int i = 0; i < 10; ++i) {
      if (!GatherOnce((*group)->transport(0)).ok()) _exit(1);
    }
    kill(getpid(), how);
    _exit(1);
  }
  auto group = NodeGroup::Join(options[0]).value();
  Transport& transport = group->transport(0);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(GatherOnce(transport).ok());
  Status status = GatherOnce(transport);
  EXPECT_EQ(group->control().Receive().status().message(), status.message());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return status;
}

TEST(NodeGroup, AKilledProcessIsNoticedAtOnce) {
  const Status status = EndOfAProcess(SIGKILL, std::chrono::hours(1));
  EXPECT_EQ(status.code(), StatusCode::kPeer);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("node 1 ("), HasSubstr("has gone")));
}

TEST(NodeGroup, AStoppedProcessIsNoticedByItsSilence) {
  const Status status = EndOfAProcess(SIGSTOP, std::chrono::seconds(3));
  EXPECT_EQ(status.code(), StatusCode::kPeer);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("node 1 ("), HasSubstr("silent")));
}

TEST(NodeGroup, WrongOptionsAreRefusedInOneLine) {
  const auto expect = [](const char* what, const std::function<void(JoinOptions&)>& change) {
    JoinOptions options = OptionsFor({1, 1})[1];
    change(options);
    const Status status = NodeGroup::Join(options).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(what));
  };
  expect("--nnodes", [](JoinOptions& o) { o.num_nodes = 0; });
  expect("--node-rank", [](JoinOptions& o) { o.node_rank = 2; });
  expect("--master-addr", [](JoinOptions& o) { o.master_addr = ""; });
  expect("--master-port", [](JoinOptions& o) { o.master_port = 70'000; });
  expect("secret", [](JoinOptions& o) { o.secret = ""; });
}

}  // namespace
}  // namespace fathom::comm
