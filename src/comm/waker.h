// Waker: how a thread that waits in poll() is woken by another. Wake is for any thread; the rest
// for the one that waits: it arms the waker, looks once more whether there is something to do, and
// polls fd() with its sockets. A Wake after Arm makes fd() readable; before it, it costs nothing.
#pragma once

#include <atomic>

namespace fathom::comm {

class Waker {
 public:
  Waker();
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  void Wake();
  void Arm() { armed_ = true; }
  void Drain();  // fd() is unreadable again
  int fd() const { return fd_; }

 private:
  const int fd_;
  std::atomic<bool> armed_ = false;
};

}  // namespace fathom::comm
