#include "comm/gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>

#include "comm/byte_codec.h"
#include "comm/secret_proof.h"
#include "comm/socket.h"
#include "comm/test_nodes.h"

namespace fathom::comm {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

class GateTest : public testing::Test {
 protected:
  GateTest()
      : listener_(Listen("127.0.0.1", 0).value()),
        gate_(listener_, "right", "data"),
        port_(listener_.LocalPort()) {}

  Socket ConnectRaw() { return Connect("127.0.0.1", port_, InTime()).value(); }

  // Whether the gate lets anybody in who has come and said all by now.
  bool LetsIn() { return gate_.Next(SystemClock().Now()).has_value(); }

  static bool HasBeenAnswered(const Socket& socket) {
    std::vector<pollfd> waits{{socket.fd(), POLLIN, 0}};
    return Poll(waits, SystemClock().Now() + milliseconds(5));
  }

  // The challenge of a connection; the gate has to look after its callers for it to come.
  std::string ReadChallenge(Socket& socket) {
    while (!HasBeenAnswered(socket)) EXPECT_FALSE(LetsIn());
    return socket.ReceiveAll(8 + kChallengeBytes, InTime()).value().substr(8);
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
    EXPECT_TRUE(socket.SendAll(answer, InTime()).ok());
    bool is_in = false;
    while (!HasBeenAnswered(socket)) is_in |= LetsIn();
    return is_in;
  }

  Socket listener_;
  Gate gate_;
  int port_;
};

TEST_F(GateTest, WhoKnowsTheSecretIsLetInWithItsIdentity) {
  std::thread caller(
      [&] { EXPECT_TRUE(Enter("127.0.0.1", port_, "right", "data", {7, 9}, InTime()).ok()); });
  const auto passed = gate_.Next(InTime());
  caller.join();
  ASSERT_TRUE(passed.has_value());
  EXPECT_EQ(passed->identity.from, 7U);
  EXPECT_EQ(passed->identity.to, 9U);
}

TEST_F(GateTest, WhoDoesNotKnowItIsToldSoAndNotLetIn) {
  auto caller = std::async(std::launch::async, [&] {
    const auto socket = Enter("127.0.0.1", port_, "wrong", "data", {7, 9}, InTime());
    EXPECT_EQ(socket.status().code(), StatusCode::kPeer);
    EXPECT_THAT(socket.status().message(), HasSubstr("refused this node"));
  });
  while (caller.wait_for(milliseconds(5)) != std::future_status::ready) EXPECT_FALSE(LetsIn());
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
    Poll(waits, InTime());
    Socket socket = Accept(listener_).value();
    EXPECT_TRUE(socket.SendAll("FATHOM1\n" + NewChallenge(), InTime()).ok());
    EXPECT_TRUE(socket.ReceiveAll(80, InTime()).ok());
    EXPECT_TRUE(socket.SendAll(std::string(kProofBytes, 'x'), InTime()).ok());
  });
  const auto socket = Enter("127.0.0.1", port_, "right", "data", {7, 9}, InTime());
  impostor.join();
  EXPECT_EQ(socket.status().code(), StatusCode::kPeer);
  EXPECT_THAT(socket.status().message(), HasSubstr("does not know this node's secret"));
}

TEST_F(GateTest, WhatFollowsTheAnswerIsLeftToTheReader) {
  Socket socket = ConnectRaw();
  const std::string answer = Answer("right", "data", ProofSide::kCaller, ReadChallenge(socket));
  EXPECT_TRUE(socket.SendAll(answer + "hello", InTime()).ok());
  auto caller = gate_.Next(InTime());
  ASSERT_TRUE(caller.has_value());
  EXPECT_EQ(caller->socket.ReceiveAll(5, InTime()).value(), "hello");
}

}  // namespace
}  // namespace fathom::comm
