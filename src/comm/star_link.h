// StarLink: the ControlLink of one node over its connections to the others: node 0 has one to each
// node, a node has one to node 0. Its thread owns the sockets; everybody else meets it at queues.
// What ends the group here ends GroupState, and the other way round; nobody ends GroupState after
// this object is gone.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "comm/control_link.h"
#include "comm/frame.h"
#include "comm/group_state.h"
#include "comm/socket.h"
#include "comm/waker.h"

namespace fathom::comm {

struct StarPeer {
  int node_rank = 0;
  std::string name;  // "node 1 (gpu-b)"
  Socket socket;
};

class StarLink final : public ControlLink {
 public:
  // `heartbeat_timeout`: until a silent node is held to have gone; eight heartbeats.
  StarLink(std::string own_name, bool is_center, std::vector<StarPeer> peers,
           std::shared_ptr<GroupState> state, Duration heartbeat_timeout);
  // Closes, and waits for 2 s at most until the others have closed too, or know why the group
  // ended.
  ~StarLink() override;

  Status Broadcast(std::string_view bytes) override;
  Status Send(std::string_view bytes) override;
  Result<std::optional<ControlMessage>> Receive() override;
  void Abort(const Status& reason) override { state_->Fail(reason); }
  void Close() override;

 private:
  using SharedBytes = std::shared_ptr<const std::string>;
  struct Peer {
    explicit Peer(StarPeer made);
    const int node_rank;
    const std::string name;
    Socket socket;                   // the thread's
    FrameParser parser;              // the thread's
    TimePoint last_heard;            // the thread's
    bool is_gone = false;            // the thread's: nothing more is read or sent
    size_t num_sent = 0;             // the thread's: bytes of the outbox's first
    std::deque<SharedBytes> outbox;  // guarded
    size_t outbox_bytes = 0;         // guarded
    bool has_ended = false;          // guarded: it sent kEnd
  };

  Status Post(std::string_view bytes);
  void EnqueueLocked(Peer& peer, const SharedBytes& frame);
  void CloseLocked();
  bool HasEndedLocked() const;

  // The thread's:
  void Run();
  void RunUntilEnd();
  void SayWhyAndWait(const Status& why);
  void PollOnce(TimePoint until);
  void Read(Peer& peer);
  void Take(Peer& peer, Frame frame);
  void TakeMessage(Peer& peer, std::string bytes);
  void TakeEnd(Peer& peer);
  void Write(Peer& peer);
  void SendHeartbeats();
  TimePoint FindSilent();  // when to look again
  bool IsSilent(const Peer& peer);
  bool HasEnded(const Peer& peer);
  bool IsDone();

  const std::string own_name_;
  const bool is_center_;
  const std::shared_ptr<GroupState> state_;
  const Duration heartbeat_timeout_;
  std::vector<std::unique_ptr<Peer>> peers_;
  Waker waker_;
  std::string read_buffer_;   // the thread's
  bool is_aborting_ = false;  // the thread's

  std::mutex mutex_;
  std::condition_variable received_;
  std::deque<ControlMessage> inbox_;      // guarded
  size_t inbox_bytes_ = 0;                // guarded
  bool is_closed_ = false;                // guarded: kEnd is sent, nothing may follow
  TimePoint stop_at_ = TimePoint::max();  // guarded

  std::thread thread_;
};

}  // namespace fathom::comm
