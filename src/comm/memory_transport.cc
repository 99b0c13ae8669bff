#include "comm/memory_transport.h"

#include <fmt/format.h>

#include <condition_variable>
#include <cstring>
#include <mutex>

#include "base/check.h"

namespace fathom::comm {
namespace {

// A mailbox for every pair of ranks holds one message, in the sender's memory, until it is taken. A
// sender does not leave while its memory is being read.
struct World {
  explicit World(int ranks, Duration limit)
      : size(ranks),
        timeout(limit),
        mailboxes(static_cast<size_t>(ranks) * static_cast<size_t>(ranks)) {}

  struct Mailbox {
    enum class State { kEmpty, kFull, kReading };
    State state = State::kEmpty;
    std::span<const std::byte> bytes = {};
  };
  Mailbox& At(int from, int to) {
    return mailboxes[static_cast<size_t>(from) * static_cast<size_t>(size) +
                     static_cast<size_t>(to)];
  }

  const int size;
  const Duration timeout;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Mailbox> mailboxes;  // guarded
  Status error;                    // guarded
};

class MemoryTransport final : public Transport {
 public:
  MemoryTransport(std::shared_ptr<World> world, int rank) : world_(std::move(world)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return world_->size; }

  Status Exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming) override {
    std::unique_lock lock(world_->mutex);
    const Status status = ExchangeAll(lock, outgoing, incoming);
    if (!status.ok()) {
      for (const Outgoing& message : outgoing) {
        World::Mailbox& box = Box(message);
        world_->changed.wait(lock, [&] { return box.state != State::kReading; });
        box.state = State::kEmpty;
      }
    }
    return status;
  }

  void Abort(const Status& reason) override {
    const std::lock_guard lock(world_->mutex);
    if (world_->error.ok()) world_->error = reason;
    world_->changed.notify_all();
  }

 private:
  using State = World::Mailbox::State;

  Status ExchangeAll(std::unique_lock<std::mutex>& lock, std::span<const Outgoing> outgoing,
                     std::span<const Incoming> incoming) {
    for (const Outgoing& message : outgoing) {
      RETURN_IF_ERROR(AwaitState(lock, message.to, Box(message), State::kEmpty));
      Box(message) = {State::kFull, message.bytes};
    }
    world_->changed.notify_all();
    for (const Incoming& message : incoming) {
      World::Mailbox& box = world_->At(message.from, rank_);
      RETURN_IF_ERROR(AwaitState(lock, message.from, box, State::kFull));
      CHECK_EQ(box.bytes.size(), message.bytes.size());
      box.state = State::kReading;
      lock.unlock();
      if (!box.bytes.empty()) std::memcpy(message.bytes.data(), box.bytes.data(), box.bytes.size());
      lock.lock();
      box.state = State::kEmpty;
      world_->changed.notify_all();
    }
    for (const Outgoing& message : outgoing) {
      RETURN_IF_ERROR(AwaitState(lock, message.to, Box(message), State::kEmpty));
    }
    return OkStatus();
  }

  World::Mailbox& Box(const Outgoing& message) { return world_->At(rank_, message.to); }

  Status AwaitState(std::unique_lock<std::mutex>& lock, int peer, const World::Mailbox& box,
                    State state) {
    const bool in_time = world_->changed.wait_for(
        lock, world_->timeout, [&] { return !world_->error.ok() || box.state == state; });
    if (!in_time) {
      world_->error = PeerError(fmt::format("rank {} waited {:.0f} s for rank {}: it hangs", rank_,
                                            Seconds(world_->timeout), peer));
      world_->changed.notify_all();
    }
    return world_->error;
  }

  const std::shared_ptr<World> world_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> MakeMemoryTransports(int size, Duration timeout) {
  const auto world = std::make_shared<World>(size, timeout);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(std::make_unique<MemoryTransport>(world, rank));
  }
  return transports;
}

}  // namespace fathom::comm
