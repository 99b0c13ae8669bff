// Transport: one rank's connections to all others of its world, for host memory. What crosses it
// between two ranks arrives in the order it was sent. Exchange is called by one thread, the rank's;
// Abort by any.
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"

namespace fathom::comm {

struct Outgoing {
  int to = 0;
  std::span<const std::byte> bytes;
};

struct Incoming {
  int from = 0;
  std::span<std::byte> bytes;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Whether the other rank is a thread of this process.
  virtual bool SharesMemoryWith(int rank) const = 0;

  // Sends and receives all of these at once and returns when all are done: two ranks that send to
  // each other do not wait for each other's receive. At most one message to a rank and one from
  // it; none to itself. The receiver knows the size: another one is our bug. kPeer: a rank is gone,
  // has aborted, or does not answer in time; nothing can be exchanged after it.
  virtual Status Exchange(std::span<const Outgoing> outgoing,
                          std::span<const Incoming> incoming) = 0;

  // Ends the world: every Exchange of every rank fails from now on, with this reason.
  virtual void Abort(const Status& reason) = 0;
};

}  // namespace fathom::comm
