#include "comm/star_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "comm/test_nodes.h"

namespace fathom::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

// Node 0 with the raw end of its connection with node 1.
struct Center {
  explicit Center(Duration heartbeat_timeout) {
    auto [own, theirs] = ConnectedPair();
    peer = std::move(theirs);
    std::vector<StarPeer> peers;
    peers.push_back({1, "node 1 (there)", std::move(own)});
    link = std::make_unique<StarLink>("node 0 (here)", true, std::move(peers), state,
                                      heartbeat_timeout);
  }

  void PeerSends(std::string_view bytes) { EXPECT_TRUE(peer.SendAll(bytes, InTime()).ok()); }
  // The next frame that is no heartbeat.
  Frame PeerReceives() {
    std::vector<Frame> frames;
    FrameParser parser(kMaxControlBytes);
    while (true) {
      const auto byte = peer.ReceiveAll(1, InTime());
      EXPECT_TRUE(byte.ok());
      if (!byte.ok() || !parser.Parse(*byte, &frames).ok()) return {FrameKind::kHello, ""};
      if (frames.empty()) continue;
      if (frames[0].kind != FrameKind::kHeartbeat) return frames[0];
      frames.clear();
    }
  }
  std::string Reason() {
    const auto message = link->Receive();
    EXPECT_EQ(message.status().code(), StatusCode::kPeer);
    return message.status().message();
  }

  std::shared_ptr<GroupState> state = std::make_shared<GroupState>();
  Socket peer;
  std::unique_ptr<StarLink> link;
};

TEST(StarLink, ANodeThatIsSilentIsHeldToHaveGone) {
  Center center(milliseconds(300));
  EXPECT_THAT(center.Reason(), HasSubstr("node 1 (there) has been silent"));
}

TEST(StarLink, HeartbeatsAreEnoughToBeThere) {
  Center center(seconds(3));  // which a busy machine takes from nobody
  for (int i = 0; i < 18; ++i) {
    center.PeerSends(EncodeFrame(FrameKind::kHeartbeat, ""));
    std::this_thread::sleep_for(milliseconds(200));
  }
  EXPECT_FALSE(center.state->failed());
}

TEST(StarLink, AConnectionThatEndsIsANodeThatHasGone) {
  Center center(seconds(60));
  center.peer = Socket();
  EXPECT_THAT(center.Reason(), HasSubstr("node 1 (there) has gone"));
}

TEST(StarLink, AFrameThatIsTooLongEndsTheGroup) {
  Center center(seconds(60));
  center.PeerSends(std::string("\xff\xff\xff\xff\1", 5));
  EXPECT_THAT(center.Reason(), HasSubstr("node 1 (there): it sends a message of 4294967295 bytes"));
}

TEST(StarLink, AFrameOfNoKnownKindEndsTheGroup) {
  Center center(seconds(60));
  center.PeerSends(std::string("\0\0\0\0\x63", 5));
  EXPECT_THAT(center.Reason(), HasSubstr("unknown kind 99"));
}

TEST(StarLink, AFrameThatBelongsToTheMeetingEndsTheGroup) {
  Center center(seconds(60));
  center.PeerSends(EncodeFrame(FrameKind::kRoster, ""));
  EXPECT_THAT(center.Reason(), HasSubstr("node 1 (there) is not in step"));
}

TEST(StarLink, TheReasonOfAFailureIsTheLastThingSent) {
  Center center(seconds(60));
  EXPECT_TRUE(center.link->Broadcast("step").ok());
  EXPECT_EQ(center.PeerReceives().bytes, "step");
  center.link->Abort(DeviceError("GPU 0 fell off the bus"));
  const Frame last = center.PeerReceives();
  EXPECT_EQ(last.kind, FrameKind::kAbort);
  EXPECT_EQ(last.bytes, "node 0 (here): GPU 0 fell off the bus");
  EXPECT_FALSE(center.peer.ReceiveAll(1, InTime()).ok());
}

TEST(StarLink, AnotherNodesReasonIsPassedOnAsItIs) {
  Center center(seconds(60));
  center.PeerSends(EncodeFrame(FrameKind::kAbort, "node 1 (there): out of memory"));
  EXPECT_EQ(center.Reason(), "node 1 (there): out of memory");
}

TEST(StarLink, ClosingWaitsForThePeersEndButNotForever) {
  Center center(seconds(60));
  center.link->Close();
  EXPECT_EQ(center.PeerReceives().kind, FrameKind::kEnd);
  center.PeerSends(EncodeFrame(FrameKind::kMessage, "on its way"));
  EXPECT_EQ(center.link->Receive().value()->bytes, "on its way");
  center.PeerSends(EncodeFrame(FrameKind::kEnd, ""));
  EXPECT_FALSE(center.link->Receive().value().has_value());
}

TEST(StarLink, APeerThatHangsDoesNotKeepTheEndWaiting) {
  Center center(std::chrono::hours(1));
  center.link = nullptr;
}

}  // namespace
}  // namespace fathom::comm
