// RankTransport: the Transport of one rank: to the ranks of its node through memory (mailboxes.h),
// to the others over a TCP connection each, all at once in one loop of the rank's thread. On a
// connection a message is its length in 8 bytes, then its bytes, which are read straight to where
// they belong.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/group_state.h"
#include "comm/mailboxes.h"
#include "comm/socket.h"
#include "comm/transport.h"

namespace fathom::comm {

// What the ranks of one node share.
struct RankWorld {
  // Wakes its ranks when the group ends.
  static std::shared_ptr<RankWorld> Make(std::shared_ptr<GroupState> state,
                                         std::vector<std::string> rank_names, int first_local,
                                         int num_local, Duration timeout);

  const std::shared_ptr<GroupState> state;
  const std::vector<std::string>
      rank_names;  // of all ranks, for messages: "rank 3 (node 1, gpu-b)"
  const int first_local;
  const Duration timeout;  // of an exchange in which nothing moves
  Mailboxes mailboxes;
};

class RankTransport final : public Transport {
 public:
  // `sockets`: by rank; closed where the rank is of this node.
  RankTransport(std::shared_ptr<RankWorld> world, int rank, std::vector<Socket> sockets);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_->rank_names.size()); }
  bool SharesMemoryWith(int rank) const override { return IsLocal(rank); }
  Status Exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming) override;
  void Abort(const Status& reason) override { world_->state->Fail(reason); }

 private:
  using Length = std::array<std::byte, 8>;
  // A message on its way; `length` goes before it on a connection.
  struct Sending {
    Outgoing message;
    Length length;
    size_t num_sent = 0;
    bool is_done = false;
  };
  struct Receiving {
    Incoming message;
    Length length = {};
    size_t num_received = 0;
    bool is_done = false;
  };

  bool IsLocal(int rank) const;
  int Local(int rank) const { return rank - world_->first_local; }
  Socket& SocketOf(int rank) { return sockets_[static_cast<size_t>(rank)]; }
  const std::string& Name(int rank) const { return world_->rank_names[static_cast<size_t>(rank)]; }

  Status MoveAll(bool* progress);
  Status Move(Sending& sending, bool* progress);
  Status Move(Receiving& receiving, bool* progress);
  Status CheckLength(const Receiving& receiving) const;
  bool WaitForMore(TimePoint deadline);
  Status WaitedTooLong() const;
  Status Lost(int peer, const Status& why);
  void WithdrawAll();
  std::optional<int> MissingPeer() const;

  const std::shared_ptr<RankWorld> world_;
  const int rank_;
  std::vector<Socket> sockets_;
  // Of the current exchange.
  std::vector<Sending> sendings_;
  std::vector<Receiving> receivings_;
};

}  // namespace fathom::comm
