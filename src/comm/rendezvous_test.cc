#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "comm/frame.h"
#include "comm/gate.h"
#include "comm/node_group.h"
#include "comm/roster.h"
#include "comm/test_nodes.h"

namespace fathom::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;

TimePoint After(Duration d) { return SystemClock().Now() + d; }

// All nodes end with this line, whichever is the one that differs.
void ExpectRefused(const std::vector<JoinOptions>& options,
                   const testing::Matcher<std::string>& line) {
  for (const auto& result : JoinAll(options)) {
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(result.status().message(), line);
  }
}

TEST(Rendezvous, SaysWhatDiffersAndOnWhichNode) {
  auto options = OptionsFor({1, 1, 1});
  for (JoinOptions& one : options) {
    one.agreements = {{"model", "abc"}, {"--tensor-parallel-size", "3"}};
  }
  options[2].agreements[1].value = "1";
  ExpectRefused(options, AllOf(HasSubstr("--tensor-parallel-size is 1 on node 2 ("),
                               HasSubstr("and 3 on node 0 (")));
}

TEST(Rendezvous, AnOptionThatOneNodeDoesNotHaveDiffers) {
  auto options = OptionsFor({1, 1});
  options[0].agreements = {{"--enable-expert-parallel", "true"}};
  ExpectRefused(options, HasSubstr("--enable-expert-parallel is not set on node 1 ("));
}

TEST(Rendezvous, AnotherVersionIsRefused) {
  const auto options = OptionsFor({1, 1});
  JoinRequest request = MakeJoinRequest(options[1], 1);
  request.agreements[0].value = "0.0.1";
  std::thread old([&] {
    std::optional<Socket> socket;
    while (!socket) {
      auto entered = Enter("127.0.0.1", options[0].master_port, options[0].secret, "control",
                           {1, 0}, After(seconds(1)));
      if (entered.ok()) socket = std::move(*entered);
    }
    EXPECT_TRUE(
        socket->SendAll(EncodeFrame(FrameKind::kHello, Encode(request)), After(seconds(1))).ok());
    EXPECT_TRUE(socket->ReceiveAll(kFrameHeadBytes, After(seconds(10))).ok());
  });
  const Status status = NodeGroup::Join(options[0]).status();
  old.join();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("the version is 0.0.1 on node 1 ("));
}

TEST(Rendezvous, TwoNodesOfOneRankAreRefused) {
  auto options = OptionsFor({1, 1, 1});
  options[2].node_rank = 1;
  ExpectRefused(options, HasSubstr("two nodes have --node-rank 1"));
}

TEST(Rendezvous, ANodeOfAnotherGroupSizeIsRefused) {
  auto options = OptionsFor({1, 1});
  options[1].num_nodes = 3;
  ExpectRefused(options, HasSubstr("--nnodes is 3 on node 1 ("));
}

TEST(Rendezvous, TooFewDevicesForTheLayoutAreRefused) {
  auto options = OptionsFor({2, 2});
  options[1].num_local_ranks = 1;
  ExpectRefused(options, HasSubstr("need 4 devices; the nodes have 3"));
}

TEST(Rendezvous, AWrongSecretIsRefusedAndTheOthersGoOnWaiting) {
  auto options = OptionsFor({1, 1});
  JoinOptions stranger = options[1];
  stranger.secret = "another";
  options.push_back(stranger);
  JoinResults results;
  for (size_t i = 0; i < 3; ++i) results.push_back(InternalError("not joined"));
  OnThreads(3, [&](size_t i) {
    if (i == 1) std::this_thread::sleep_for(milliseconds(300));
    results[i] = NodeGroup::Join(options[i]);
  });
  EXPECT_TRUE(results[0].ok() && results[1].ok());
  EXPECT_EQ(results[2].status().code(), StatusCode::kPeer);
  EXPECT_THAT(results[2].status().message(), HasSubstr("secret"));
}

TEST(Rendezvous, ALateNodeIsWaitedFor) {
  const auto options = OptionsFor({1, 1, 1});
  std::array<bool, 3> joined = {};
  OnThreads(3, [&](size_t i) {
    std::this_thread::sleep_for(milliseconds(400 * (2 - i)));  // node 0 comes last
    joined[i] = NodeGroup::Join(options[i]).ok();
  });
  EXPECT_THAT(joined, testing::Each(true));
}

TEST(Rendezvous, WhoDoesNotComeIsNamed) {
  auto options = OptionsFor({1, 1, 1});
  for (JoinOptions& one : options) one.join_timeout = milliseconds(700);
  options.pop_back();
  for (const auto& result : JoinAll(options)) {
    EXPECT_EQ(result.status().code(), StatusCode::kPeer);
    EXPECT_THAT(result.status().message(), HasSubstr("node 2 did not come"));
  }
  const Status alone = NodeGroup::Join(options[1]).status();
  EXPECT_THAT(alone.message(), AllOf(HasSubstr("did not reach node 0"), HasSubstr("127.0.0.1:")));
}

TEST(Rendezvous, ATakenPortIsAnError) {
  const auto options = OptionsFor({1, 1});
  const Socket taken = Listen("127.0.0.1", options[0].master_port).value();
  const Status status = NodeGroup::Join(options[0]).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("in use"));
}

// Two nodes meet while `stranger`, which is there before node 1, does what it does.
void ExpectToMeetBeside(const std::function<void(const JoinOptions&)>& stranger) {
  const auto options = OptionsFor({1, 1});
  std::array<bool, 2> joined = {};
  OnThreads(3, [&](size_t i) {
    if (i == 2) return stranger(options[0]);
    std::this_thread::sleep_for(milliseconds(200 * i));
    joined[i] = NodeGroup::Join(options[i]).ok();
  });
  EXPECT_THAT(joined, testing::Each(true));
}

void ExpectUnharmedBy(const std::string& bytes, bool stays) {
  ExpectToMeetBeside([&](const JoinOptions& options) {
    std::optional<Socket> socket;
    while (!socket) {
      auto connected = Connect("127.0.0.1", options.master_port, After(seconds(1)));
      if (connected.ok()) socket = std::move(*connected);
    }
    EXPECT_TRUE(socket->SendAll(bytes, After(seconds(1))).ok());
    if (stays) std::this_thread::sleep_for(milliseconds(600));
  });
}

TEST(Rendezvous, GarbageOnThePortHarmsNobody) {
  ExpectUnharmedBy("GET / HTTP/1.1\r\nHost: x\r\n\r\n", true);
  ExpectUnharmedBy(std::string(100'000, 'x'), false);
  ExpectUnharmedBy("", true);
  ExpectUnharmedBy("FATHOM1\n", false);
  ExpectUnharmedBy("FATHOM1\n" + std::string(72, '\0'), true);
}

TEST(Rendezvous, ManySilentStrangersDoNotKeepANodeOut) {
  const auto options = OptionsFor({1, 1});
  std::array<bool, 2> joined = {};
  OnThreads(2, [&](size_t i) {
    std::vector<Socket> strangers;
    if (i == 1) {
      std::this_thread::sleep_for(milliseconds(100));
      for (int n = 0; n < 50; ++n) {
        strangers.push_back(
            Connect("127.0.0.1", options[0].master_port, After(seconds(1))).value());
      }
    }
    joined[i] = NodeGroup::Join(options[i]).ok();
  });
  EXPECT_THAT(joined, testing::Each(true));
}

// A node that knows the secret and then sends these bytes instead of asking to join.
void ExpectRestJoinsDespite(const std::string& bytes) {
  ExpectToMeetBeside([&](const JoinOptions& options) {
    std::this_thread::sleep_for(milliseconds(50));
    Socket socket = Enter("127.0.0.1", options.master_port, options.secret, "control", {1, 0},
                          After(seconds(1)))
                        .value();
    EXPECT_TRUE(socket.SendAll(bytes, After(seconds(1))).ok());
  });
}

TEST(Rendezvous, ARequestThatCannotBeReadIsRefusedAlone) {
  ExpectRestJoinsDespite(EncodeFrame(FrameKind::kHello, "not a request"));
  ExpectRestJoinsDespite(EncodeFrame(FrameKind::kMessage, "hello"));
  ExpectRestJoinsDespite(std::string("\xff\xff\xff\xff\x05", 5));
  ExpectRestJoinsDespite("");
}

TEST(Rendezvous, ANodeThatWasStartedAgainTakesItsOwnPlace) {
  const auto options = OptionsFor({1, 1, 1});
  const JoinRequest request = MakeJoinRequest(options[1], 1);
  std::array<bool, 3> joined = {};
  OnThreads(3, [&](size_t i) {
    if (i == 1) {
      std::this_thread::sleep_for(milliseconds(100));
      Socket socket = Enter("127.0.0.1", options[0].master_port, options[0].secret, "control",
                            {1, 0}, After(seconds(1)))
                          .value();
      EXPECT_TRUE(
          socket.SendAll(EncodeFrame(FrameKind::kHello, Encode(request)), After(seconds(1))).ok());
    }
    if (i > 0) std::this_thread::sleep_for(milliseconds(200 * i));
    joined[i] = NodeGroup::Join(options[i]).ok();
  });
  EXPECT_THAT(joined, testing::Each(true));
}

TEST(Rendezvous, AnotherServerAtTheMasterAddressIsNamed) {
  auto options = OptionsFor({1, 1});
  const Socket listener = Listen("127.0.0.1", options[0].master_port).value();
  std::thread server([&] {
    std::vector<pollfd> waits{{listener.fd(), POLLIN, 0}};
    Poll(waits, After(seconds(5)));
    Socket socket = Accept(listener).value();
    EXPECT_TRUE(socket.SendAll(std::string(200, 'H'), After(seconds(1))).ok());
    std::this_thread::sleep_for(milliseconds(100));
  });
  const Status status = NodeGroup::Join(options[1]).status();
  server.join();
  EXPECT_EQ(status.code(), StatusCode::kPeer);
  EXPECT_THAT(status.message(), HasSubstr("no Fathom node"));
}

}  // namespace
}  // namespace fathom::comm
