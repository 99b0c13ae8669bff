#include "comm/star_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fathom::comm {
namespace {

constexpr size_t kReadBytes = size_t{64} << 10;
constexpr size_t kMaxWaitingBytes = 2 * kMaxControlBytes;  // of messages to, or from, one node
constexpr size_t kMessageOverhead = 64;                    // so that empty ones count
constexpr size_t kMaxReasonBytes = 4096;
constexpr int kHeartbeatsPerTimeout = 8;
constexpr Duration kEndPatience = std::chrono::seconds(2);
constexpr Duration kAbortPatience = std::chrono::seconds(1);

TimePoint Now() { return SystemClock().Now(); }

}  // namespace

StarLink::Peer::Peer(StarPeer made)
    : node_rank(made.node_rank),
      name(std::move(made.name)),
      socket(std::move(made.socket)),
      parser(kMaxControlBytes),
      last_heard(Now()) {}

StarLink::StarLink(std::string own_name, bool is_center, std::vector<StarPeer> peers,
                   std::shared_ptr<GroupState> state, Duration heartbeat_timeout)
    : own_name_(std::move(own_name)),
      is_center_(is_center),
      state_(std::move(state)),
      heartbeat_timeout_(heartbeat_timeout),
      read_buffer_(kReadBytes, '\0') {
  for (StarPeer& peer : peers) peers_.push_back(std::make_unique<Peer>(std::move(peer)));
  state_->OnFailure([this] {
    {
      const std::lock_guard lock(mutex_);
    }  // whoever has looked in vain waits by now
    received_.notify_all();
    waker_.Wake();
  });
  if (!peers_.empty()) thread_ = std::thread([this] { Run(); });
}

StarLink::~StarLink() {
  {
    const std::lock_guard lock(mutex_);
    CloseLocked();
    stop_at_ = Now() + kEndPatience;
  }
  waker_.Wake();
  if (thread_.joinable()) thread_.join();
}

Status StarLink::Broadcast(std::string_view bytes) {
  CHECK(is_center_);
  return Post(bytes);
}

Status StarLink::Send(std::string_view bytes) {
  CHECK(!is_center_);
  return Post(bytes);
}

Status StarLink::Post(std::string_view bytes) {
  RETURN_IF_ERROR(state_->error());
  if (bytes.size() > kMaxControlBytes) {
    return InvalidArgument(fmt::format("a message to other nodes has {} bytes; at most {}",
                                       bytes.size(), kMaxControlBytes));
  }
  const auto frame = std::make_shared<const std::string>(EncodeFrame(FrameKind::kMessage, bytes));
  Status status;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return PeerError("the group of nodes was closed");
    for (auto& peer : peers_) {
      EnqueueLocked(*peer, frame);
      if (peer->outbox_bytes > kMaxWaitingBytes) {
        status = PeerError(fmt::format("{} does not keep up: {} bytes of messages wait for it",
                                       peer->name, peer->outbox_bytes));
      }
    }
  }
  if (!status.ok()) {
    state_->Fail(status);
    return state_->error();
  }
  waker_.Wake();
  return OkStatus();
}

void StarLink::EnqueueLocked(Peer& peer, const SharedBytes& frame) {
  peer.outbox.push_back(frame);
  peer.outbox_bytes += frame->size() + kMessageOverhead;
}

Result<std::optional<ControlMessage>> StarLink::Receive() {
  std::unique_lock lock(mutex_);
  received_.wait(lock, [&] { return state_->failed() || !inbox_.empty() || HasEndedLocked(); });
  RETURN_IF_ERROR(state_->error());
  if (inbox_.empty()) return std::optional<ControlMessage>();
  std::optional<ControlMessage> message(std::move(inbox_.front()));
  inbox_.pop_front();
  inbox_bytes_ -= message->bytes.size() + kMessageOverhead;
  return message;
}

void StarLink::Close() {
  {
    const std::lock_guard lock(mutex_);
    CloseLocked();
  }
  received_.notify_all();
  waker_.Wake();
}

void StarLink::CloseLocked() {
  if (is_closed_) return;
  is_closed_ = true;
  const auto frame = std::make_shared<const std::string>(EncodeFrame(FrameKind::kEnd, ""));
  for (auto& peer : peers_) EnqueueLocked(*peer, frame);
}

bool StarLink::HasEndedLocked() const {
  return is_closed_ && std::all_of(peers_.begin(), peers_.end(),
                                   [](const auto& peer) { return peer->has_ended; });
}

void StarLink::Run() {
  RunUntilEnd();
  if (const Status why = state_->error(); !why.ok()) SayWhyAndWait(why);
}

void StarLink::RunUntilEnd() {
  const Duration interval = heartbeat_timeout_ / kHeartbeatsPerTimeout;
  TimePoint next_heartbeat = Now();
  while (!state_->failed() && !IsDone()) {
    if (Now() >= next_heartbeat) {
      SendHeartbeats();
      next_heartbeat = Now() + interval;
    }
    PollOnce(std::min(next_heartbeat, FindSilent()));
  }
}

bool StarLink::IsDone() {
  const std::lock_guard lock(mutex_);
  if (Now() >= stop_at_) return true;
  return HasEndedLocked() && std::all_of(peers_.begin(), peers_.end(),
                                         [](const auto& peer) { return peer->outbox.empty(); });
}

// The others get the reason and have a moment to read it: closing a connection with something
// unread in it would take what was sent last away from them.
void StarLink::SayWhyAndWait(const Status& why) {
  const bool is_own = why.code() != StatusCode::kPeer;
  const std::string text = is_own ? fmt::format("{}: {}", own_name_, why.message()) : why.message();
  const auto frame = std::make_shared<const std::string>(
      EncodeFrame(FrameKind::kAbort, text.substr(0, kMaxReasonBytes)));
  is_aborting_ = true;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    for (auto& peer : peers_) {
      peer->outbox.resize(peer->num_sent == 0 ? 0 : 1);  // what has begun is finished
      EnqueueLocked(*peer, frame);
    }
  }
  const TimePoint deadline = Now() + kAbortPatience;
  const auto is_gone = [](const auto& peer) { return peer->is_gone; };
  while (Now() < deadline && !std::all_of(peers_.begin(), peers_.end(), is_gone)) {
    PollOnce(deadline);
  }
  for (auto& peer : peers_) peer->socket = Socket();
}

void StarLink::PollOnce(TimePoint until) {
  waker_.Arm();
  if (state_->failed() && !is_aborting_) return;  // whose Wake came before
  std::vector<pollfd> waits{{waker_.fd(), POLLIN, 0}};
  {
    const std::lock_guard lock(mutex_);
    until = std::min(until, stop_at_);
    for (auto& peer : peers_) {
      const int wanted = POLLIN | (peer->outbox.empty() ? 0 : POLLOUT);
      waits.push_back({peer->is_gone ? -1 : peer->socket.fd(), static_cast<short>(wanted), 0});
    }
  }
  Poll(waits, until);
  waker_.Drain();
  for (size_t i = 0; i < peers_.size(); ++i) {
    if ((waits[i + 1].revents & ~POLLOUT) != 0) Read(*peers_[i]);
    if (!peers_[i]->is_gone && (waits[i + 1].revents & POLLOUT) != 0) Write(*peers_[i]);
  }
}

void StarLink::Read(Peer& peer) {
  const auto received = peer.socket.Receive(std::as_writable_bytes(std::span(read_buffer_)));
  if (!received.ok()) {
    peer.is_gone = true;
    if (HasEnded(peer)) return;
    return state_->Fail(
        PeerError(fmt::format("{} has gone: {}", peer.name, received.status().message())));
  }
  if (*received == 0) return;
  peer.last_heard = Now();
  std::vector<Frame> frames;
  const Status status =
      peer.parser.Parse(std::string_view(read_buffer_).substr(0, *received), &frames);
  for (Frame& frame : frames) Take(peer, std::move(frame));
  if (!status.ok()) {
    peer.is_gone = true;
    state_->Fail(PeerError(fmt::format("{}: {}", peer.name, status.message())));
  }
}

void StarLink::Take(Peer& peer, Frame frame) {
  switch (frame.kind) {
    case FrameKind::kMessage:
      return TakeMessage(peer, std::move(frame.bytes));
    case FrameKind::kHeartbeat:
      return;
    case FrameKind::kAbort:
      return state_->Fail(PeerError(frame.bytes.substr(0, kMaxReasonBytes)));
    case FrameKind::kEnd:
      return TakeEnd(peer);
    case FrameKind::kHello:
    case FrameKind::kRoster:
    case FrameKind::kRefusal:
      return state_->Fail(PeerError(fmt::format("{} is not in step: it joins again", peer.name)));
  }
}

void StarLink::TakeMessage(Peer& peer, std::string bytes) {
  bool is_too_much = false;
  {
    const std::lock_guard lock(mutex_);
    inbox_bytes_ += bytes.size() + kMessageOverhead;
    is_too_much = inbox_bytes_ > kMaxWaitingBytes;
    if (!is_too_much) inbox_.push_back({peer.node_rank, std::move(bytes)});
  }
  if (is_too_much) {
    state_->Fail(PeerError(
        fmt::format("{} does not keep up with the messages of {}", own_name_, peer.name)));
  }
  received_.notify_all();
}

void StarLink::TakeEnd(Peer& peer) {
  bool is_early = false;
  {
    const std::lock_guard lock(mutex_);
    peer.has_ended = true;
    is_early = is_center_ && !is_closed_;
    if (!is_early) CloseLocked();
  }
  if (is_early) state_->Fail(PeerError(fmt::format("{} has left", peer.name)));
  received_.notify_all();
}

void StarLink::Write(Peer& peer) {
  SharedBytes frame;
  {
    const std::lock_guard lock(mutex_);
    if (peer.outbox.empty()) return;
    frame = peer.outbox.front();
  }
  const auto bytes = std::as_bytes(std::span(*frame)).subspan(peer.num_sent);
  const auto sent = peer.socket.Send(bytes, {});
  if (!sent.ok()) return;  // Read finds out
  peer.num_sent += *sent;
  if (peer.num_sent < frame->size()) return;
  const std::lock_guard lock(mutex_);
  peer.num_sent = 0;
  peer.outbox.pop_front();
  peer.outbox_bytes -= frame->size() + kMessageOverhead;
  if (is_aborting_ && peer.outbox.empty()) peer.socket.FinishSending();
}

void StarLink::SendHeartbeats() {
  static const auto frame =
      std::make_shared<const std::string>(EncodeFrame(FrameKind::kHeartbeat, ""));
  const std::lock_guard lock(mutex_);
  if (is_closed_) return;
  for (auto& peer : peers_) {
    if (peer->outbox.empty()) EnqueueLocked(*peer, frame);
  }
}

bool StarLink::IsSilent(const Peer& peer) {
  return !peer.is_gone && !HasEnded(peer) && Now() - peer.last_heard >= heartbeat_timeout_;
}

TimePoint StarLink::FindSilent() {
  TimePoint next = TimePoint::max();
  for (auto& peer : peers_) {
    if (IsSilent(*peer)) Read(*peer);  // this thread may have been the one that slept
    if (IsSilent(*peer)) {
      peer->is_gone = true;
      state_->Fail(PeerError(
          fmt::format("{} has been silent for {:.1f} s: it hangs, or the network between does",
                      peer->name, Seconds(Now() - peer->last_heard))));
    }
    if (!peer->is_gone && !HasEnded(*peer)) {
      next = std::min(next, peer->last_heard + heartbeat_timeout_);
    }
  }
  return next;
}

bool StarLink::HasEnded(const Peer& peer) {
  const std::lock_guard lock(mutex_);
  return peer.has_ended;
}

}  // namespace fathom::comm
