#include "comm/rendezvous.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "comm/frame.h"
#include "comm/gate.h"
#include "comm/secret_proof.h"

namespace fathom::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::string_view kPurpose = "control";
constexpr Duration kPatience = seconds(10);        // with one connection
constexpr Duration kReportInterval = seconds(10);  // of who is missing
constexpr Duration kRetryInterval = milliseconds(200);
// Nodes that are a little later than the one that differs are told too.
constexpr Duration kTimeForStragglers = seconds(5);

TimePoint Now() { return SystemClock().Now(); }

Result<Frame> ReadFrame(Socket& socket, TimePoint deadline) {
  ASSIGN_OR_RETURN(const std::string bytes, socket.ReceiveAll(kFrameHeadBytes, deadline));
  ASSIGN_OR_RETURN(const FrameHead head, DecodeFrameHead(bytes, kMaxMeetingBytes));
  ASSIGN_OR_RETURN(std::string rest, socket.ReceiveAll(head.num_bytes, deadline));
  return Frame{head.kind, std::move(rest)};
}

// Node 0, until all are there.
class Reception {
 public:
  Reception(const JoinOptions& options, Socket listener)
      : options_(options),
        own_(MakeJoinRequest(options, listener.LocalPort())),
        listener_(std::move(listener)),
        deadline_(Now() + options.join_timeout) {}

  Result<Meeting> Receive() {
    LogInfo("node 0 waits for {} other nodes at {}", options_.num_nodes - 1,
            HostPort(options_.master_addr, own_.data_port));
    Gate gate(listener_, options_.secret, std::string(kPurpose));
    TimePoint next_report = Now() + kReportInterval;
    while (!AllAreThere() && Now() < deadline_) {
      if (auto caller = gate.Next(std::min(deadline_, next_report))) Welcome(std::move(*caller));
      if (Now() < next_report) continue;
      LogInfo("node 0 waits for {}", Missing());
      next_report = Now() + kReportInterval;
    }
    if (difference_.empty()) difference_ = FindWrongSize();
    if (!difference_.empty()) {
      Tell(FrameKind::kRefusal, difference_);
      return InvalidArgument(difference_);
    }
    if (!AllAreThere()) {
      const std::string line =
          fmt::format("{} did not come to node 0 ({}) within {:.0f} s", Missing(), own_.host_name,
                      Seconds(options_.join_timeout));
      Tell(FrameKind::kAbort, line);
      return PeerError(line);
    }
    return Begin();
  }

 private:
  struct Guest {
    Socket socket;
    JoinRequest request;
    std::string name;
  };

  void Welcome(Caller caller) {
    const std::string address = caller.socket.PeerAddress();
    const auto request = [&]() -> Result<JoinRequest> {
      ASSIGN_OR_RETURN(const Frame frame, ReadFrame(caller.socket, Now() + kPatience));
      if (frame.kind != FrameKind::kHello) return PeerError("it does not ask to join");
      return DecodeJoinRequest(frame.bytes);
    }();
    if (!request.ok()) {
      LogWarning("a node at {} was not let in: {}", address, request.status().message());
      return;
    }
    const std::string name = NodeName(request->node_rank, request->host_name);
    std::string difference = FindDifference(own_, *request);
    if (difference.empty()) difference = FindDouble(*request);
    guests_.push_back({std::move(caller.socket), *request, name});
    if (difference.empty()) {
      LogInfo("{} is there, with {} ranks: {} of {} nodes", name, request->num_local_ranks,
              guests_.size() + 1, options_.num_nodes);
    } else if (difference_.empty()) {
      difference_ = difference;
      deadline_ = std::min(deadline_, Now() + kTimeForStragglers);
    }
  }

  // Without those that have gone since: they may be started again.
  bool AllAreThere() {
    std::erase_if(guests_, [](Guest& guest) {
      std::byte byte;
      return !guest.socket.Receive({&byte, 1}).ok();
    });
    return static_cast<int>(guests_.size()) == options_.num_nodes - 1;
  }

  // A node that was started again takes the place of the one that has gone.
  std::string FindDouble(const JoinRequest& request) {
    const auto known = std::find_if(guests_.begin(), guests_.end(), [&](const Guest& guest) {
      return guest.request.node_rank == request.node_rank;
    });
    if (known == guests_.end()) return "";
    std::byte byte;
    if (known->socket.Receive({&byte, 1}).ok()) {
      return fmt::format("two nodes have --node-rank {}, on {} and {}; give each its own",
                         request.node_rank, known->request.host_name, request.host_name);
    }
    guests_.erase(known);
    return "";
  }

  std::string FindWrongSize() const {
    if (static_cast<int>(guests_.size()) < options_.num_nodes - 1) return "";
    int sum = own_.num_local_ranks;
    std::string parts = fmt::format("{} on {}", own_.num_local_ranks, NodeName(0, own_.host_name));
    for (const Guest& guest : guests_) {
      sum += guest.request.num_local_ranks;
      parts += fmt::format(", {} on {}", guest.request.num_local_ranks, guest.name);
    }
    if (sum == options_.world_size) return "";
    return fmt::format("the parallel sizes need {} devices; the nodes have {}: {}",
                       options_.world_size, sum, parts);
  }

  std::string Missing() const {
    std::string ranks;
    int count = 0;
    for (int node = 1; node < options_.num_nodes; ++node) {
      const bool is_there = std::any_of(guests_.begin(), guests_.end(), [&](const Guest& guest) {
        return guest.request.node_rank == node;
      });
      if (!is_there) ranks += fmt::format("{}{}", count++ == 0 ? "" : ", ", node);
    }
    return fmt::format("node{} {}", count == 1 ? "" : "s", ranks);
  }

  void Tell(FrameKind kind, const std::string& line) {
    const std::string frame = EncodeFrame(kind, line);
    for (Guest& guest : guests_) {
      if (guest.socket.SendAll(frame, Now() + seconds(1)).ok()) guest.socket.FinishSending();
    }
  }

  Result<Meeting> Begin() {
    std::sort(guests_.begin(), guests_.end(), [](const Guest& a, const Guest& b) {
      return a.request.node_rank < b.request.node_rank;
    });
    Meeting meeting;
    meeting.roster.session_id = NewChallenge();
    meeting.roster.nodes.push_back({own_.host_name, "", own_.data_port, own_.num_local_ranks});
    for (Guest& guest : guests_) {
      meeting.roster.nodes.push_back({guest.request.host_name, guest.socket.PeerAddress(),
                                      guest.request.data_port, guest.request.num_local_ranks});
    }
    const std::string frame = EncodeFrame(FrameKind::kRoster, Encode(meeting.roster));
    for (Guest& guest : guests_) {
      const Status status = guest.socket.SendAll(frame, Now() + kPatience);
      if (!status.ok()) {
        const std::string line = fmt::format("{} has gone: {}", guest.name, status.message());
        Tell(FrameKind::kAbort, line);
        return PeerError(line);
      }
    }
    for (Guest& guest : guests_) {
      meeting.peers.push_back({guest.request.node_rank, guest.name, std::move(guest.socket)});
    }
    meeting.listener = std::move(listener_);
    return meeting;
  }

  const JoinOptions& options_;
  const JoinRequest own_;
  Socket listener_;
  TimePoint deadline_;
  std::vector<Guest> guests_;
  std::string difference_;
};

Result<Socket> ReachNode0(const JoinOptions& options, TimePoint deadline) {
  TimePoint next_report = Now();
  while (true) {
    const CallerIdentity identity{static_cast<uint32_t>(options.node_rank), 0};
    auto socket = Enter(options.master_addr, options.master_port, options.secret, kPurpose,
                        identity, std::min(deadline, Now() + kPatience));
    if (socket.ok()) return socket;
    const Status failure = socket.status();
    const std::string& why = failure.message();
    if (failure.code() != StatusCode::kUnavailable) {
      return PeerError(fmt::format("node {} cannot join: {}", options.node_rank, why));
    }
    if (Now() + kRetryInterval >= deadline) {
      return PeerError(fmt::format("node {} did not reach node 0 within {:.0f} s: {}",
                                   options.node_rank, Seconds(options.join_timeout), why));
    }
    if (Now() >= next_report) {
      LogInfo("node {} waits for node 0: {}", options.node_rank, why);
      next_report = Now() + kReportInterval;
    }
    std::this_thread::sleep_for(kRetryInterval);
  }
}

Result<Meeting> MeetAtNode0(const JoinOptions& options) {
  const TimePoint deadline = Now() + options.join_timeout;
  ASSIGN_OR_RETURN(Socket socket, ReachNode0(options, deadline));
  Meeting meeting;
  ASSIGN_OR_RETURN(meeting.listener, Listen(socket.LocalAddress(), 0));
  const JoinRequest request = MakeJoinRequest(options, meeting.listener.LocalPort());
  const auto node0_said = [&](const Status& why) {
    return PeerError(fmt::format("node {} cannot join: node 0 at {}: {}", options.node_rank,
                                 HostPort(options.master_addr, options.master_port),
                                 why.message()));
  };
  const Status sent =
      socket.SendAll(EncodeFrame(FrameKind::kHello, Encode(request)), Now() + kPatience);
  if (!sent.ok()) return node0_said(sent);
  LogInfo("node {} has reached node 0 and waits for the others", options.node_rank);
  // Node 0 gives up before this does.
  const auto frame = ReadFrame(socket, deadline + options.join_timeout + kPatience);
  if (!frame.ok()) return node0_said(frame.status());
  if (frame->kind == FrameKind::kRefusal) return InvalidArgument(frame->bytes);
  if (frame->kind == FrameKind::kAbort) return PeerError(frame->bytes);
  auto roster = DecodeRoster(frame->kind == FrameKind::kRoster ? frame->bytes : "");
  if (!roster.ok()) return node0_said(roster.status());
  if (static_cast<int>(roster->nodes.size()) != options.num_nodes) {
    return node0_said(PeerError("it names another number of nodes"));
  }
  meeting.roster = std::move(*roster);
  meeting.roster.nodes[0].address = options.master_addr;
  meeting.roster.nodes[0].data_port = options.master_port;
  meeting.peers.push_back({0, NodeName(0, meeting.roster.nodes[0].host_name), std::move(socket)});
  return meeting;
}

}  // namespace

Result<Meeting> Meet(const JoinOptions& options) {
  if (options.node_rank != 0) return MeetAtNode0(options);
  ASSIGN_OR_RETURN(Socket listener, Listen(options.master_addr, options.master_port));
  return Reception(options, std::move(listener)).Receive();
}

}  // namespace fathom::comm
