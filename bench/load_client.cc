#include "bench/load_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <charconv>

#include "base/check.h"

namespace fathom::bench {

LoadClient::LoadClient(int port, size_t num_connections,
                       const std::function<std::string(size_t connection_idx)>& request_of)
    : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)), connections_(num_connections) {
  CHECK_GE(epoll_fd_, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (size_t i = 0; i < num_connections; ++i) {
    Connection& connection = connections_[i];
    connection.idx = i;
    connection.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(connection.fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const int on = 1;
    setsockopt(connection.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = i;
    CHECK_EQ(epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, connection.fd, &event), 0);
    requests_.push_back(request_of(i));
  }
}

LoadClient::~LoadClient() {
  for (const Connection& connection : connections_) close(connection.fd);
  close(epoll_fd_);
}

void LoadClient::Send(Connection& connection) {
  connection.received.clear();
  connection.scanned = 0;
  connection.num_events = 0;
  connection.body_begin = 0;
  connection.length = 0;
  connection.sent = std::chrono::steady_clock::now();
  const std::string& request = requests_[connection.idx];
  CHECK_EQ(send(connection.fd, request.data(), request.size(), MSG_NOSIGNAL),
           static_cast<ssize_t>(request.size()));
}

void LoadClient::Run(const Callbacks& callbacks) {
  for (Connection& connection : connections_) Send(connection);
  size_t num_open = connections_.size();
  std::array<epoll_event, 256> events;
  while (num_open > 0) {
    const int n = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), 10'000);
    CHECK_GT(n, 0);  // the server has been silent for 10 s
    for (int i = 0; i < n; ++i) {
      Connection& connection = connections_[events[static_cast<size_t>(i)].data.u64];
      if (!Read(connection, callbacks)) --num_open;
    }
  }
}

bool LoadClient::Read(Connection& connection, const Callbacks& callbacks) {
  std::array<char, 64 << 10> buffer;
  const ssize_t n = recv(connection.fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
  CHECK_GT(n, 0);  // the server closed a connection
  std::string& text = connection.received;
  text.append(buffer.data(), static_cast<size_t>(n));
  if (connection.body_begin == 0) ReadHead(connection);
  constexpr std::string_view kData = "data: ";
  for (size_t begin; (begin = text.find(kData, connection.scanned)) != std::string::npos;) {
    const size_t end = text.find("\n\n", begin);
    if (end == std::string::npos) break;
    if (callbacks.on_event) {
      callbacks.on_event(
          connection, connection.num_events,
          std::string_view(text).substr(begin + kData.size(), end - begin - kData.size()));
    }
    ++connection.num_events;
    connection.scanned = end + 2;
  }
  if (!IsComplete(connection)) return true;
  ++connection.num_answers;
  if (!callbacks.on_answer(connection)) return false;
  Send(connection);
  return true;
}

void LoadClient::ReadHead(Connection& connection) {
  constexpr std::string_view kOk = "HTTP/1.1 200", kLength = "Content-Length: ";
  const std::string_view text = connection.received;
  CHECK_EQ(text.substr(0, kOk.size()), kOk.substr(0, text.size()));
  const size_t end = text.find("\r\n\r\n");
  if (end == std::string::npos) return;
  connection.body_begin = connection.scanned = end + 4;
  const size_t at = text.substr(0, end).find(kLength);
  if (at == std::string::npos) return;
  std::from_chars(text.data() + at + kLength.size(), text.data() + end, connection.length);
}

bool LoadClient::IsComplete(const Connection& connection) {
  if (connection.body_begin == 0) return false;
  if (connection.length == 0) return connection.received.ends_with("\r\n0\r\n\r\n");
  return connection.received.size() >= connection.body_begin + connection.length;
}

}  // namespace fathom::bench
