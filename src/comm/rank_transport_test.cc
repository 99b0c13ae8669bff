#include "comm/rank_transport.h"

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

// Rank 0, and the raw end of its connection with rank 1.
struct OneRank {
  explicit OneRank(Duration timeout) {
    auto [own, theirs] = ConnectedPair();
    peer = std::move(theirs);
    std::vector<Socket> sockets(2);
    sockets[1] = std::move(own);
    transport = std::make_unique<RankTransport>(
        RankWorld::Make(std::make_shared<GroupState>(),
                        {"rank 0 (node 0, here)", "rank 1 (node 1, there)"}, 0, 1, timeout),
        0, std::move(sockets));
  }

  Status Receive(size_t size) {
    received.resize(size);
    const Incoming incoming{1, std::as_writable_bytes(std::span(received))};
    return transport->Exchange({}, {&incoming, 1});
  }
  Status Send(const std::string& bytes) {
    const Outgoing outgoing{1, std::as_bytes(std::span(bytes))};
    return transport->Exchange({&outgoing, 1}, {});
  }
  void PeerSends(std::string_view bytes) { EXPECT_TRUE(peer.SendAll(bytes, InTime()).ok()); }

  Socket peer;
  std::unique_ptr<RankTransport> transport;
  std::string received;
};

constexpr std::string_view kLength4("\4\0\0\0\0\0\0\0", 8);

TEST(RankTransport, AMessageMayArriveInAnyPieces) {
  OneRank rank(seconds(60));
  std::thread peer([&] {
    for (const char c : std::string(kLength4) + "abcd" + std::string(kLength4) + "efgh") {
      rank.PeerSends({&c, 1});
    }
  });
  EXPECT_TRUE(rank.Receive(4).ok());
  EXPECT_EQ(rank.received, "abcd");
  EXPECT_TRUE(rank.Receive(4).ok());
  EXPECT_EQ(rank.received, "efgh");
  peer.join();
}

TEST(RankTransport, APeerThatClosesInTheMiddleOfAMessageIsNamed) {
  OneRank rank(seconds(60));
  rank.PeerSends(std::string(kLength4) + "ab");
  rank.peer = Socket();
  const Status status = rank.Receive(4);
  EXPECT_EQ(status.code(), StatusCode::kPeer);
  EXPECT_THAT(status.message(), HasSubstr("rank 1 (node 1, there) has gone"));
  EXPECT_FALSE(rank.Send("x").ok());
}

TEST(RankTransport, APeerThatStopsInTheMiddleOfAMessageIsWaitedForInVain) {
  OneRank rank(milliseconds(100));
  rank.PeerSends(std::string(kLength4) + "ab");
  EXPECT_THAT(rank.Receive(4).message(), HasSubstr("for rank 1 (node 1, there): it hangs"));
}

TEST(RankTransport, APeerThatTakesNothingIsWaitedForInVain) {
  OneRank rank(milliseconds(100));
  EXPECT_THAT(rank.Send(std::string(size_t{64} << 20, 'x')).message(),
              HasSubstr("for rank 1 (node 1, there): it hangs"));
}

TEST(RankTransport, ASlowPeerIsNotOneThatHangs) {
  OneRank rank(seconds(3));  // which a busy machine takes from nobody
  std::thread peer([&] {
    for (const char c : std::string(kLength4) + "abcd") {
      rank.PeerSends({&c, 1});
      std::this_thread::sleep_for(milliseconds(300));
    }
  });
  EXPECT_TRUE(rank.Receive(4).ok());
  peer.join();
}

TEST(RankTransport, AnyLengthButTheExpectedOneIsAnError) {
  for (const std::string_view length :
       {std::string_view("\5\0\0\0\0\0\0\0", 8), std::string_view("\0\0\0\0\0\0\0\0", 8),
        std::string_view("\xff\xff\xff\xff\xff\xff\xff\xff", 8)}) {
    OneRank rank(seconds(60));
    rank.PeerSends(std::string(length) + "abcdefgh");
    EXPECT_THAT(rank.Receive(4).message(), HasSubstr("rank 1 (node 1, there) sends "));
  }
}

// Rank 0 waits in one exchange for rank 2 of another node and sends to rank 1 beside it; rank 2
// goes on only when rank 1 has.
TEST(RankTransport, MessagesInMemoryDoNotWaitForThoseOverTcp) {
  TestWorld world({2, 1});
  world.OnEveryRank([](Transport& transport) {
    std::byte byte{};
    const auto exchange = [&](std::vector<int> to, std::vector<int> from) {
      std::vector<Outgoing> outgoing;
      std::vector<Incoming> incoming;
      std::byte into[3];
      for (const int rank : to) outgoing.push_back({rank, {&byte, 1}});
      for (const int rank : from) {
        incoming.push_back({rank, {into + static_cast<size_t>(rank), 1}});
      }
      ASSERT_TRUE(transport.Exchange(outgoing, incoming).ok());
    };
    for (int round = 0; round < 20; ++round) {
      if (transport.rank() == 0) exchange({1}, {1, 2});
      if (transport.rank() == 1) {
        exchange({0}, {});
        exchange({}, {0});
        exchange({2}, {});
      }
      if (transport.rank() == 2) {
        exchange({}, {1});
        exchange({0}, {});
      }
    }
  });
}

TEST(RankTransport, LargeMessagesBothWaysAtOnceDoNotBlockEachOther) {
  TestWorld world({1, 1});
  world.OnEveryRank([](Transport& transport) {
    const int other = 1 - transport.rank();
    std::vector<std::byte> out(size_t{16} << 20, std::byte(transport.rank() + 1)), in(out.size());
    const Outgoing outgoing{other, out};
    const Incoming incoming{other, in};
    ASSERT_TRUE(transport.Exchange({&outgoing, 1}, {&incoming, 1}).ok());
    EXPECT_EQ(in, std::vector<std::byte>(out.size(), std::byte(other + 1)));
  });
}

}  // namespace
}  // namespace fathom::comm
