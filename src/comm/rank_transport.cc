#include "comm/rank_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fathom::comm {
namespace {

// Why a connection ended usually comes by the control link a moment later, and says more.
constexpr Duration kReasonGrace = std::chrono::seconds(1);

std::array<std::byte, 8> EncodeLength(size_t size) {
  std::array<std::byte, 8> bytes = {};
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(size >> (8 * i));
  return bytes;
}

}  // namespace

std::shared_ptr<RankWorld> RankWorld::Make(std::shared_ptr<GroupState> state,
                                           std::vector<std::string> rank_names, int first_local,
                                           int num_local, Duration timeout) {
  const std::shared_ptr<RankWorld> world(
      new RankWorld{state, std::move(rank_names), first_local, timeout, Mailboxes(num_local)});
  state->OnFailure([weak = std::weak_ptr(world)] {
    if (const auto alive = weak.lock()) alive->mailboxes.WakeAll();
  });
  return world;
}

RankTransport::RankTransport(std::shared_ptr<RankWorld> world, int rank,
                             std::vector<Socket> sockets)
    : world_(std::move(world)), rank_(rank), sockets_(std::move(sockets)) {
  CHECK(IsLocal(rank));
  sockets_.resize(world_->rank_names.size());
}

bool RankTransport::IsLocal(int rank) const {
  return Local(rank) >= 0 && Local(rank) < world_->mailboxes.num_ranks();
}

Status RankTransport::Exchange(std::span<const Outgoing> outgoing,
                               std::span<const Incoming> incoming) {
  RETURN_IF_ERROR(world_->state->error());
  sendings_.clear();
  receivings_.clear();
  for (const Outgoing& message : outgoing) {
    if (IsLocal(message.to)) {
      world_->mailboxes.Post(Local(rank_), Local(message.to), message.bytes);
    }
    sendings_.push_back({message, EncodeLength(message.bytes.size())});
  }
  for (const Incoming& message : incoming) receivings_.push_back({message});

  TimePoint deadline = SystemClock().Now() + world_->timeout;
  Status status;
  while (status.ok()) {
    world_->mailboxes.waker(Local(rank_)).Arm();
    status = world_->state->error();
    bool progress = false;
    if (status.ok()) status = MoveAll(&progress);
    if (status.ok() && !MissingPeer()) return OkStatus();
    if (progress) deadline = SystemClock().Now() + world_->timeout;
    if (status.ok() && !progress && !WaitForMore(deadline)) status = WaitedTooLong();
  }
  world_->state->Fail(status);
  WithdrawAll();
  return world_->state->error();
}

Status RankTransport::MoveAll(bool* progress) {
  for (Sending& sending : sendings_) {
    if (!sending.is_done) RETURN_IF_ERROR(Move(sending, progress));
  }
  for (Receiving& receiving : receivings_) {
    if (!receiving.is_done) RETURN_IF_ERROR(Move(receiving, progress));
  }
  return OkStatus();
}

Status RankTransport::Move(Sending& sending, bool* progress) {
  const auto [to, bytes] = sending.message;
  if (IsLocal(to)) {
    sending.is_done = world_->mailboxes.IsTaken(Local(rank_), Local(to));
    *progress |= sending.is_done;
    return OkStatus();
  }
  const std::span<const std::byte> length = sending.length;
  const size_t length_sent = std::min(sending.num_sent, length.size());
  const auto sent =
      SocketOf(to).Send(length.subspan(length_sent), bytes.subspan(sending.num_sent - length_sent));
  if (!sent.ok()) return Lost(to, sent.status());
  sending.num_sent += *sent;
  sending.is_done = sending.num_sent == length.size() + bytes.size();
  *progress |= *sent > 0;
  return OkStatus();
}

Status RankTransport::Move(Receiving& receiving, bool* progress) {
  const auto [from, bytes] = receiving.message;
  if (IsLocal(from)) {
    receiving.is_done = world_->mailboxes.TryTake(Local(from), Local(rank_), bytes);
    *progress |= receiving.is_done;
    return OkStatus();
  }
  const std::span<std::byte> length = receiving.length;
  while (!receiving.is_done) {
    const bool in_length = receiving.num_received < length.size();
    const auto received =
        SocketOf(from).Receive(in_length ? length.subspan(receiving.num_received)
                                         : bytes.subspan(receiving.num_received - length.size()));
    if (!received.ok()) return Lost(from, received.status());
    if (*received == 0) return OkStatus();
    *progress = true;
    receiving.num_received += *received;
    if (receiving.num_received == length.size()) RETURN_IF_ERROR(CheckLength(receiving));
    receiving.is_done = receiving.num_received == length.size() + bytes.size();
  }
  return OkStatus();
}

Status RankTransport::CheckLength(const Receiving& receiving) const {
  const auto [from, bytes] = receiving.message;
  if (receiving.length == EncodeLength(bytes.size())) return OkStatus();
  size_t length = 0;
  for (size_t i = 0; i < receiving.length.size(); ++i) {
    length |= static_cast<size_t>(receiving.length[i]) << (8 * i);
  }
  return PeerError(fmt::format("{} sends {} bytes where {} expects {}: they are not in step",
                               Name(from), length, Name(rank_), bytes.size()));
}

bool RankTransport::WaitForMore(TimePoint deadline) {
  Waker& waker = world_->mailboxes.waker(Local(rank_));
  std::vector<pollfd> waits{{waker.fd(), POLLIN, 0}};
  const auto add = [&](int peer, bool is_done, short events) {
    if (!is_done && !IsLocal(peer)) waits.push_back({SocketOf(peer).fd(), events, 0});
  };
  for (const Sending& sending : sendings_) add(sending.message.to, sending.is_done, POLLOUT);
  for (const Receiving& receiving : receivings_) {
    add(receiving.message.from, receiving.is_done, POLLIN);
  }
  const bool in_time = Poll(waits, deadline);
  waker.Drain();
  return in_time;
}

std::optional<int> RankTransport::MissingPeer() const {
  for (const Receiving& receiving : receivings_) {
    if (!receiving.is_done) return receiving.message.from;
  }
  for (const Sending& sending : sendings_) {
    if (!sending.is_done) return sending.message.to;
  }
  return std::nullopt;
}

Status RankTransport::WaitedTooLong() const {
  return PeerError(fmt::format("{} waited {:.1f} s for {}: it hangs, or is not in step",
                               Name(rank_), Seconds(world_->timeout), Name(*MissingPeer())));
}

Status RankTransport::Lost(int peer, const Status& why) {
  RETURN_IF_ERROR(world_->state->AwaitError(kReasonGrace));
  return PeerError(fmt::format("{} has gone: {}", Name(peer), why.message()));
}

void RankTransport::WithdrawAll() {
  for (const Sending& sending : sendings_) {
    if (IsLocal(sending.message.to)) {
      world_->mailboxes.Withdraw(Local(rank_), Local(sending.message.to));
    }
  }
}

}  // namespace fathom::comm
