#include "comm/waker.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "base/check.h"

namespace fathom::comm {

Waker::Waker() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) { CHECK(fd_ >= 0); }

Waker::~Waker() { close(fd_); }

void Waker::Wake() {
  if (!armed_.exchange(false)) return;
  const uint64_t one = 1;
  CHECK_EQ(write(fd_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
}

void Waker::Drain() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t size = read(fd_, &count, sizeof(count));
}

}  // namespace fathom::comm
