// Socket: a TCP connection or listener of this process, non-blocking; the one place with POSIX
// socket calls. Connections send at once (TCP_NODELAY), and an idle one ends when the other side
// answers nothing for about 8 s. One thread at a time.
#pragma once

#include <poll.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace fathom::comm {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }

  // How many bytes were moved: 0 when it would have to wait. kPeer: the connection has ended.
  Result<size_t> Send(std::span<const std::byte> head, std::span<const std::byte> body);
  Result<size_t> Receive(std::span<std::byte> into);

  // All of it. kPeer: as above, or not before the deadline.
  Status SendAll(std::string_view bytes, TimePoint deadline);
  Result<std::string> ReceiveAll(size_t size, TimePoint deadline);

  // The other side reads an end after what was sent.
  void FinishSending();

  std::string LocalAddress() const;  // without port, as digits
  std::string PeerAddress() const;
  int LocalPort() const;

 private:
  int fd_ = -1;
};

// `port` 0: any free one. An `address` that is a number of this machine is the only one listened
// at; with another, or a name, it is all of them. kInvalidArgument: the port is taken or not
// allowed.
Result<Socket> Listen(const std::string& address, int port);

// None when nobody waits to be let in.
std::optional<Socket> Accept(const Socket& listener);

// Tries all addresses of the host. kUnavailable: none of them answers before the deadline.
Result<Socket> Connect(const std::string& host, int port, TimePoint deadline);

// Waits until one of these is ready; false at the deadline.
bool Poll(std::vector<pollfd>& waits, TimePoint deadline);

std::string HostName();
std::string HostPort(const std::string& host, int port);  // "[::1]:80"

}  // namespace fathom::comm
