#include "comm/gate.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "comm/byte_codec.h"
#include "comm/secret_proof.h"

namespace fathom::comm {
namespace {

using std::chrono::seconds;

constexpr std::string_view kGreeting = "FATHOM1\n";
constexpr size_t kIdentityBytes = 8;
constexpr size_t kAnswerBytes = kGreeting.size() + kIdentityBytes + kChallengeBytes + kProofBytes;
constexpr size_t kMaxPending = 64;
constexpr int kMaxComplaints = 20;
constexpr Duration kPatience = seconds(5);
constexpr char kZeros[kProofBytes] = {};
constexpr std::string_view kRefused(kZeros, kProofBytes);  // instead of a proof

std::string EncodeIdentity(CallerIdentity identity) {
  ByteWriter out;
  out.Put(identity.from);
  out.Put(identity.to);
  return out.Take();
}

}  // namespace

Gate::Gate(const Socket& listener, std::string secret, std::string purpose)
    : listener_(listener), secret_(std::move(secret)), purpose_(std::move(purpose)) {}

std::optional<Caller> Gate::Next(TimePoint deadline) {
  while (true) {
    Admit();
    if (std::optional<Caller> caller = Advance()) return caller;
    if (SystemClock().Now() >= deadline) return std::nullopt;
    WaitForCallers(deadline);
  }
}

void Gate::Admit() {
  while (pending_.size() < kMaxPending) {
    std::optional<Socket> socket = Accept(listener_);
    if (!socket) return;
    Pending pending{std::move(*socket), "", NewChallenge(), "", SystemClock().Now() + kPatience};
    pending.address = pending.socket.PeerAddress();
    // A new connection takes these few bytes at once, or is not worth having.
    const std::string greeting = std::string(kGreeting) + pending.challenge;
    if (pending.socket.SendAll(greeting, SystemClock().Now()).ok()) {
      pending_.push_back(std::move(pending));
    }
  }
}

void Gate::WaitForCallers(TimePoint deadline) {
  std::vector<pollfd> waits;
  if (pending_.size() < kMaxPending) waits.push_back({listener_.fd(), POLLIN, 0});
  for (const Pending& pending : pending_) {
    waits.push_back({pending.socket.fd(), POLLIN, 0});
    deadline = std::min(deadline, pending.deadline);
  }
  Poll(waits, deadline);
}

std::optional<Caller> Gate::Advance() {
  for (size_t i = 0; i < pending_.size();) {
    Pending& pending = pending_[i];
    const Progress progress = Read(pending);
    if (progress == Progress::kWaits) {
      ++i;
      continue;
    }
    Caller caller{std::move(pending.socket), {}};
    ByteReader answer(std::string_view(pending.answer).substr(kGreeting.size()));
    caller.identity.from = answer.Get<uint32_t>();
    caller.identity.to = answer.Get<uint32_t>();
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    if (progress == Progress::kPassed) return caller;
  }
  return std::nullopt;
}

Gate::Progress Gate::Read(Pending& pending) {
  const size_t before = pending.answer.size();
  pending.answer.resize(kAnswerBytes);
  const auto room = std::as_writable_bytes(std::span(pending.answer)).subspan(before);
  const auto received = pending.socket.Receive(room);
  pending.answer.resize(before + (received.ok() ? *received : 0));
  const size_t known = std::min(pending.answer.size(), kGreeting.size());
  if (std::string_view(pending.answer).substr(0, known) != kGreeting.substr(0, known)) {
    Complain(pending, "it is no Fathom node of this version");
  } else if (pending.answer.size() == kAnswerBytes) {
    return Judge(pending);
  } else if (!received.ok()) {
    Complain(pending, "it left before it had introduced itself");
  } else if (SystemClock().Now() >= pending.deadline) {
    Complain(pending, "it did not introduce itself in time");
  } else {
    return Progress::kWaits;
  }
  pending.answer.resize(kAnswerBytes);
  return Progress::kRefused;
}

Gate::Progress Gate::Judge(Pending& pending) {
  ByteReader answer(pending.answer);
  answer.GetBytes(kGreeting.size());
  ProofSubject subject{.purpose = purpose_,
                       .identity = answer.GetBytes(kIdentityBytes),
                       .listener_challenge = pending.challenge,
                       .caller_challenge = answer.GetBytes(kChallengeBytes)};
  const bool is_right = IsProof(answer.GetBytes(kProofBytes), secret_, ProofSide::kCaller, subject);
  const std::string reply =
      is_right ? MakeProof(secret_, ProofSide::kListener, subject) : std::string(kRefused);
  const bool is_told = pending.socket.SendAll(reply, SystemClock().Now()).ok();
  if (!is_right) Complain(pending, "its secret is not this group's");
  return is_right && is_told ? Progress::kPassed : Progress::kRefused;
}

void Gate::Complain(const Pending& pending, std::string_view what) {
  if (++num_complaints_ > kMaxComplaints) return;
  LogWarning("a connection from {} was refused: {}{}", pending.address, what,
             num_complaints_ == kMaxComplaints ? " (more of these are not shown)" : "");
}

Result<Socket> Enter(const std::string& host, int port, std::string_view secret,
                     std::string_view purpose, CallerIdentity identity, TimePoint deadline) {
  const std::string name = HostPort(host, port);
  const auto not_there = [&](const Status& why) {
    return Unavailable(fmt::format("{} was reached, but {}", name, why.message()));
  };
  ASSIGN_OR_RETURN(Socket socket, Connect(host, port, deadline));
  const auto greeting = socket.ReceiveAll(kGreeting.size() + kChallengeBytes, deadline);
  if (!greeting.ok()) return not_there(greeting.status());
  if (!greeting->starts_with(kGreeting)) {
    return PeerError(fmt::format("what listens at {} is no Fathom node of this version", name));
  }
  const std::string id = EncodeIdentity(identity);
  const std::string challenge = NewChallenge();
  const ProofSubject subject{
      .purpose = purpose,
      .identity = id,
      .listener_challenge = std::string_view(*greeting).substr(kGreeting.size()),
      .caller_challenge = challenge};
  const std::string proof = MakeProof(secret, ProofSide::kCaller, subject);
  const Status sent = socket.SendAll(std::string(kGreeting) + id + challenge + proof, deadline);
  if (!sent.ok()) return not_there(sent);
  const auto reply = socket.ReceiveAll(kProofBytes, deadline);
  if (!reply.ok()) return not_there(reply.status());
  if (IsProof(*reply, secret, ProofSide::kListener, subject)) return socket;
  return PeerError(fmt::format("{} {}: give all nodes the same secret", name,
                               *reply == kRefused ? "refused this node, its secret is another"
                                                  : "does not know this node's secret"));
}

}  // namespace fathom::comm
