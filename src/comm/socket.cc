#include "comm/socket.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace fathom::comm {
namespace {

// An idle connection ends after 8 s without an answer: 3 probes of 2 s after 2 s. One with data on
// its way has no such limit (TCP_USER_TIMEOUT would count a receiver that computes as one that has
// gone): heartbeats notice who is not there.
constexpr int kKeepIdleS = 2;
constexpr int kKeepIntervalS = 2;
constexpr int kKeepCount = 3;
constexpr int kBacklog = 512;

std::string ErrorText(int error) { return std::generic_category().message(error); }

Status Ended(int error) {
  return PeerError(error == 0 ? "the connection was closed"
                              : fmt::format("the connection ended ({})", ErrorText(error)));
}

bool WouldWait(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

void SetOption(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof(value));
}

void SetConnectionOptions(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleS);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalS);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
}

struct Address {
  sockaddr_storage storage = {};
  socklen_t size = sizeof(storage);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

std::string Digits(Address& address) {
  std::array<char, NI_MAXHOST> host = {};
  if (getnameinfo(address.get(), address.size, host.data(), host.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return "?";
  }
  constexpr std::string_view kMapped = "::ffff:";  // how a listener at all addresses sees IPv4
  const std::string_view text = host.data();
  return std::string(text.starts_with(kMapped) ? text.substr(kMapped.size()) : text);
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Empty where there are none.
AddressList Resolve(const std::string& host, int port, int flags, std::string* error) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(),
                               &hints, &found);
  if (code != 0) *error = code == EAI_SYSTEM ? ErrorText(errno) : gai_strerror(code);
  return {code == 0 ? found : nullptr, &freeaddrinfo};
}

Socket NewSocket(int family) {
  return Socket(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// 0, or why not.
int ListenAt(Socket& socket, const sockaddr* address, socklen_t size, int family) {
  socket = NewSocket(family);
  if (!socket.is_open()) return errno;
  SetOption(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (family == AF_INET6) SetOption(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(socket.fd(), address, size) != 0 || listen(socket.fd(), kBacklog) != 0) return errno;
  return 0;
}

int ListenEverywhere(Socket& socket, int port) {
  sockaddr_in6 any6 = {};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(static_cast<uint16_t>(port));
  const int error = ListenAt(socket, reinterpret_cast<sockaddr*>(&any6), sizeof(any6), AF_INET6);
  if (error != EAFNOSUPPORT && error != EADDRNOTAVAIL) return error;
  sockaddr_in any4 = {};  // a machine without IPv6
  any4.sin_family = AF_INET;
  any4.sin_port = htons(static_cast<uint16_t>(port));
  return ListenAt(socket, reinterpret_cast<sockaddr*>(&any4), sizeof(any4), AF_INET);
}

// 0, or why not.
int ConnectTo(Socket& socket, const addrinfo& address, TimePoint deadline) {
  socket = NewSocket(address.ai_family);
  if (!socket.is_open()) return errno;
  if (connect(socket.fd(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  std::vector<pollfd> waits{{socket.fd(), POLLOUT, 0}};
  if (!Poll(waits, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Result<size_t> Socket::Send(std::span<const std::byte> head, std::span<const std::byte> body) {
  std::array<iovec, 2> parts{iovec{const_cast<std::byte*>(head.data()), head.size()},
                             iovec{const_cast<std::byte*>(body.data()), body.size()}};
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
  if (sent >= 0) return static_cast<size_t>(sent);
  if (WouldWait(errno)) return size_t{0};
  return Ended(errno);
}

Result<size_t> Socket::Receive(std::span<std::byte> into) {
  const ssize_t received = recv(fd_, into.data(), into.size(), 0);
  if (received > 0) return static_cast<size_t>(received);
  if (received < 0 && WouldWait(errno)) return size_t{0};
  return Ended(received == 0 ? 0 : errno);
}

Status Socket::SendAll(std::string_view bytes, TimePoint deadline) {
  auto rest = std::as_bytes(std::span(bytes));
  while (!rest.empty()) {
    ASSIGN_OR_RETURN(const size_t sent, Send(rest, {}));
    rest = rest.subspan(sent);
    std::vector<pollfd> waits{{fd_, POLLOUT, 0}};
    if (!rest.empty() && !Poll(waits, deadline)) return PeerError("it takes nothing");
  }
  return OkStatus();
}

Result<std::string> Socket::ReceiveAll(size_t size, TimePoint deadline) {
  std::string bytes(size, '\0');
  auto rest = std::as_writable_bytes(std::span(bytes));
  while (!rest.empty()) {
    ASSIGN_OR_RETURN(const size_t received, Receive(rest));
    rest = rest.subspan(received);
    std::vector<pollfd> waits{{fd_, POLLIN, 0}};
    if (!rest.empty() && !Poll(waits, deadline)) return PeerError("it does not answer");
  }
  return bytes;
}

void Socket::FinishSending() { shutdown(fd_, SHUT_WR); }

std::string Socket::LocalAddress() const {
  Address address;
  return getsockname(fd_, address.get(), &address.size) == 0 ? Digits(address) : "?";
}

std::string Socket::PeerAddress() const {
  Address address;
  return getpeername(fd_, address.get(), &address.size) == 0 ? Digits(address) : "?";
}

int Socket::LocalPort() const {
  Address address;
  CHECK_EQ(getsockname(fd_, address.get(), &address.size), 0);
  const auto port = address.storage.ss_family == AF_INET6
                        ? reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port
                        : reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port;
  return ntohs(port);
}

Result<Socket> Listen(const std::string& address, int port) {
  Socket listener;
  std::string unused;
  const AddressList number = Resolve(address, port, AI_NUMERICHOST | AI_PASSIVE, &unused);
  int error = EADDRNOTAVAIL;
  if (number != nullptr) {
    error = ListenAt(listener, number->ai_addr, number->ai_addrlen, number->ai_family);
  }
  // A host's own name may mean its loopback address, and a service's address is no machine's.
  if (error == EADDRNOTAVAIL) error = ListenEverywhere(listener, port);
  if (error == 0) return listener;
  return InvalidArgument(
      fmt::format("cannot listen at {}: {}", HostPort(address, port), ErrorText(error)));
}

std::optional<Socket> Accept(const Socket& listener) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket.is_open()) return std::nullopt;
  SetConnectionOptions(socket.fd());
  return socket;
}

Result<Socket> Connect(const std::string& host, int port, TimePoint deadline) {
  std::string why = "no address";
  const AddressList addresses = Resolve(host, port, 0, &why);
  for (const addrinfo* next = addresses.get(); next != nullptr; next = next->ai_next) {
    Socket socket;
    const int error = ConnectTo(socket, *next, deadline);
    if (error == 0) {
      SetConnectionOptions(socket.fd());
      return socket;
    }
    why = ErrorText(error);
  }
  return Unavailable(fmt::format("cannot connect to {}: {}", HostPort(host, port), why));
}

bool Poll(std::vector<pollfd>& waits, TimePoint deadline) {
  while (true) {
    const Duration rest = std::max(deadline - SystemClock().Now(), Duration(0));
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(rest).count();
    const int timeout = static_cast<int>(std::min<decltype(ms)>(ms, INT_MAX));
    const int ready = poll(waits.data(), waits.size(), timeout);
    if (ready > 0) return true;
    if (ready == 0) return false;
    CHECK_EQ(errno, EINTR);
  }
}

std::string HostName() {
  std::array<char, 256> name = {};
  if (gethostname(name.data(), name.size() - 1) != 0) return "?";
  return name.data();
}

std::string HostPort(const std::string& host, int port) {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

}  // namespace fathom::comm
