// RawClient: a blocking TCP client for tests, which sends exactly the bytes it is told to.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <string_view>
#include <utility>

namespace fathom::http {

class RawClient {
 public:
  explicit RawClient(int port) : RawClient() { Connect(port); }
  RawClient() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;
  ~RawClient() { Close(); }

  bool Connect(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  void SetReceiveBuffer(int bytes) {
    setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
  }

  // False when the server has closed.
  bool Send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }

  // What came until `end` was seen, the server closed, or the time was over; `end` empty: until it
  // closed.
  std::string ReadUntil(std::string_view end,
                        std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (end.empty() || received_.find(end) == std::string::npos) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd poll_fd{fd_, POLLIN, 0};
      if (left.count() <= 0 || poll(&poll_fd, 1, static_cast<int>(left.count())) <= 0) break;
      char buffer[4096];
      const ssize_t n = recv(fd_, buffer, sizeof(buffer), 0);
      if (n <= 0) {
        closed_ = true;
        break;
      }
      received_.append(buffer, static_cast<size_t>(n));
    }
    const size_t at = end.empty() ? std::string::npos : received_.find(end);
    const size_t size = at == std::string::npos ? received_.size() : at + end.size();
    std::string out = received_.substr(0, size);
    received_.erase(0, size);
    return out;
  }
  std::string ReadToClose() { return ReadUntil(""); }
  bool closed() const { return closed_; }

 private:
  int fd_;
  bool closed_ = false;
  std::string received_;
};

}  // namespace fathom::http
