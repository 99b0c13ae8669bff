#include "comm/gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "comm/byte_codec.h"
#include "comm/secret_proof.h"
#include "comm/socket.h"

namespace fathom::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

TimePoint After(Duration d) { return SystemClock().Now() + d; }

class GateTest : public testing::Test {
 protected:
  GateTest()
      : listener_(Listen("127.0.0.1", 0).value()),
        gate_(listener_, "right", "data"),
        port_(listener_.LocalPort()) {}

  Socket ConnectRaw() { return Connect("127.0.0.1", port_, After(seconds(5))).value(); }

  // The challenge of a connection; the gate has to look after its callers for it to come.
  std::string ReadChallenge(Socket& socket) {
    EXPECT_FALSE(gate_.Next(After(milliseconds(10))).has_value());
    return socket.ReceiveAll(8 + kChallengeBytes, After(seconds(5))).value().substr(8);
  }

  // What a caller with this secret sends.
  static std::string Answer(const std::string& secret, const std::string& purpose, ProofSide side,
                            const std::string& challenge) {
    const std::string identity(8, '\1'), own_challenge(kChallengeBytes, 'x');
    const ProofSubject subject{.purpose = purpose,
                               .identity = identity,
                               .listener_challenge = challenge,
                               .caller_challenge = own_challenge};
    return "FATHOM1\n" + identity + own_challenge + MakeProof(secret, side, subject);
  }

  bool Passes(Socket& socket, const std::string& answer) {
    EXPECT_TRUE(socket.SendAll(answer, After(seconds(5))).ok());
    return gate_.Next(After(milliseconds(50))).has_value();
  }

  Socket listener_;
  Gate gate_;
  int port_;
};

TEST_F(GateTest, WhoKnowsTheSecretIsLetInWithItsIdentity) {
  std::thread caller([&] {
    EXPECT_TRUE(Enter("127.0.0.1", port_, "right", "data", {7, 9}, After(seconds(5))).ok());
  });
  const auto passed = gate_.Next(After(seconds(5)));
  caller.join();
  ASSERT_TRUE(passed.has_value());
  EXPECT_EQ(passed->identity.from, 7U);
  EXPECT_EQ(passed->identity.to, 9U);
}

TEST_F(GateTest, WhoDoesNotKnowItIsToldSoAndNotLetIn) {
  std::thread caller([&] {
    const auto socket = Enter("127.0.0.1", port_, "wrong", "data", {7, 9}, After(seconds(5)));
    EXPECT_EQ(socket.status().code(), StatusCode::kPeer);
    EXPECT_THAT(socket.status().message(), HasSubstr("refused this node"));
  });
  EXPECT_FALSE(gate_.Next(After(milliseconds(300))).has_value());
  caller.join();
}

TEST_F(GateTest, AnAnswerPassesOnceAndForItsOwnChallengeOnly) {
  Socket first = ConnectRaw();
  const std::string answer = Answer("right", "data", ProofSide::kCaller, ReadChallenge(first));
  EXPECT_TRUE(Passes(first, answer));
  Socket second = ConnectRaw();
  ReadChallenge(second);
  EXPECT_FALSE(Passes(second, answer));
}

TEST_F(GateTest, AnAnswerForSomethingElseDoesNotPass) {
  Socket other_purpose = ConnectRaw();
  EXPECT_FALSE(Passes(
      other_purpose, Answer("right", "control", ProofSide::kCaller, ReadChallenge(other_purpose))));
  Socket other_side = ConnectRaw();
  EXPECT_FALSE(
      Passes(other_side, Answer("right", "data", ProofSide::kListener, ReadChallenge(other_side))));
  Socket other_identity = ConnectRaw();
  std::string answer = Answer("right", "data", ProofSide::kCaller, ReadChallenge(other_identity));
  answer[8] = '\2';
  EXPECT_FALSE(Passes(other_identity, answer));
}

TEST_F(GateTest, AListenerThatDoesNotKnowTheSecretIsNotTrusted) {
  std::thread impostor([&] {
    std::vector<pollfd> waits{{listener_.fd(), POLLIN, 0}};
    Poll(waits, After(seconds(5)));
    Socket socket = Accept(listener_).value();
    EXPECT_TRUE(socket.SendAll("FATHOM1\n" + NewChallenge(), After(seconds(1))).ok());
    EXPECT_TRUE(socket.ReceiveAll(80, After(seconds(5))).ok());
    EXPECT_TRUE(socket.SendAll(std::string(kProofBytes, 'x'), After(seconds(1))).ok());
  });
  const auto socket = Enter("127.0.0.1", port_, "right", "data", {7, 9}, After(seconds(5)));
  impostor.join();
  EXPECT_EQ(socket.status().code(), StatusCode::kPeer);
  EXPECT_THAT(socket.status().message(), HasSubstr("does not know this node's secret"));
}

TEST_F(GateTest, WhatFollowsTheAnswerIsLeftToTheReader) {
  Socket socket = ConnectRaw();
  const std::string answer = Answer("right", "data", ProofSide::kCaller, ReadChallenge(socket));
  EXPECT_TRUE(socket.SendAll(answer + "hello", After(seconds(5))).ok());
  auto caller = gate_.Next(After(seconds(5)));
  ASSERT_TRUE(caller.has_value());
  EXPECT_EQ(caller->socket.ReceiveAll(5, After(seconds(5))).value(), "hello");
}

}  // namespace
}  // namespace fathom::comm
