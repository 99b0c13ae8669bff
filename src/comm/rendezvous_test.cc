#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <latch>
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

// A connection to the port, or one that has shown the secret as node 1, as soon as node 0 is there.
Socket ConnectWhenThere(const JoinOptions& options) {
  while (true) {
    auto socket = Connect("127.0.0.1", options.master_port, InTime());
    if (socket.ok()) return *std::move(socket);
    std::this_thread::sleep_for(milliseconds(5));
  }
}
Socket EnterWhenThere(const JoinOptions& options) {
  while (true) {
    auto socket =
        Enter("127.0.0.1", options.master_port, options.secret, "control", {1, 0}, InTime());
    if (socket.ok()) return *std::move(socket);
    std::this_thread::sleep_for(milliseconds(5));
  }
}

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
    Socket socket = EnterWhenThere(options[0]);
    EXPECT_TRUE(socket.SendAll(EncodeFrame(FrameKind::kHello, Encode(request)), InTime()).ok());
    EXPECT_TRUE(socket.ReceiveAll(kFrameHeadBytes, InTime()).ok());
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
  std::latch refused(1);
  OnThreads(3, [&](size_t i) {
    if (i == 1) refused.wait();
    results[i] = NodeGroup::Join(options[i]);
    if (i == 2) refused.count_down();
  });
  EXPECT_TRUE(results[0].ok() && results[1].ok());
  EXPECT_EQ(results[2].status().code(), StatusCode::kPeer);
  EXPECT_THAT(results[2].status().message(), HasSubstr("secret"));
}

TEST(Rendezvous, ALateNodeIsWaitedFor) {
  const auto options = OptionsFor({1, 1, 1});
  std::array<bool, 3> joined = {};
  OnThreads(3, [&](size_t i) {
    std::this_thread::sleep_for(milliseconds(400 * (2 - i)));  // as a rule node 0 comes last
    joined[i] = NodeGroup::Join(options[i]).ok();
  });
  EXPECT_THAT(joined, testing::Each(true));
}

TEST(Rendezvous, WhoDoesNotComeIsNamed) {
  auto options = OptionsFor({1, 1, 1});
  for (JoinOptions& one : options) one.join_timeout = seconds(2);  // in which node 1 comes
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

// All nodes meet after `stranger` has done to the one that is there first, node 0, what it does.
// The connections that it returns stay until then.
void ExpectToMeetAfter(const std::vector<JoinOptions>& options,
                       const std::function<std::vector<Socket>()>& stranger) {
  std::vector<int> joined(options.size());
  std::vector<Socket> staying;
  std::latch done(1);
  OnThreads(options.size(), [&](size_t i) {
    if (i == 1) {
      staying = stranger();
      done.count_down();
    }
    if (i > 1) done.wait();
    joined[i] = NodeGroup::Join(options[i]).ok();
  });
  EXPECT_THAT(joined, testing::Each(1));
}

void ExpectUnharmedBy(const std::string& bytes, bool stays) {
  const auto options = OptionsFor({1, 1});
  ExpectToMeetAfter(options, [&] {
    std::vector<Socket> sockets;
    sockets.push_back(ConnectWhenThere(options[0]));
    (void)sockets[0].SendAll(bytes, InTime());  // node 0 may close before it has read all
    if (!stays) sockets.clear();
    return sockets;
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
  ExpectToMeetAfter(options, [&] {
    std::vector<Socket> strangers;
    for (int n = 0; n < 50; ++n) strangers.push_back(ConnectWhenThere(options[0]));
    return strangers;
  });
}

// A node that knows the secret and then sends these bytes instead of asking to join, and goes.
void ExpectRestJoinsDespite(const std::string& bytes) {
  const auto options = OptionsFor({1, 1});
  ExpectToMeetAfter(options, [&] {
    EXPECT_TRUE(EnterWhenThere(options[0]).SendAll(bytes, InTime()).ok());
    return std::vector<Socket>();
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
  const std::string request =
      EncodeFrame(FrameKind::kHello, Encode(MakeJoinRequest(options[1], 1)));
  ExpectToMeetAfter(options, [&] {
    EXPECT_TRUE(EnterWhenThere(options[0]).SendAll(request, InTime()).ok());
    return std::vector<Socket>();
  });
}

TEST(Rendezvous, AnotherServerAtTheMasterAddressIsNamed) {
  auto options = OptionsFor({1, 1});
  const Socket listener = Listen("127.0.0.1", options[0].master_port).value();
  std::thread server([&] {
    std::vector<pollfd> waits{{listener.fd(), POLLIN, 0}};
    Poll(waits, InTime());
    Socket socket = Accept(listener).value();
    EXPECT_TRUE(socket.SendAll(std::string(200, 'H'), InTime()).ok());
  });
  const Status status = NodeGroup::Join(options[1]).status();
  server.join();
  EXPECT_EQ(status.code(), StatusCode::kPeer);
  EXPECT_THAT(status.message(), HasSubstr("no Fathom node"));
}

}  // namespace
}  // namespace fathom::comm
