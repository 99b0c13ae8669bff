#include "http/server.h"

#include <fmt/format.h>

#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "http/connection.h"

namespace fathom::http {
namespace {

using boost::system::error_code;
using Acceptor = asio::basic_socket_acceptor<Tcp, Strand>;

constexpr std::chrono::milliseconds kAcceptPause{200};
constexpr std::chrono::seconds kCutTime{2};

Status ListenError(const std::string& host, int port, const error_code& ec) {
  std::string remedy = ec.message();
  if (ec == asio::error::address_in_use) {
    remedy = "the port is already in use: stop the other server or choose another --port";
  } else if (ec == asio::error::access_denied) {
    remedy = "no permission: choose a --port above 1023, or grant CAP_NET_BIND_SERVICE";
  } else if (ec.value() == EADDRNOTAVAIL) {
    remedy = "this machine does not have that address: choose another --host, such as 127.0.0.1";
  }
  return InvalidArgument(fmt::format("cannot listen on {}:{}: {}", host, port, remedy));
}

bool IsOutOfResources(const error_code& ec) {
  return ec.value() == EMFILE || ec.value() == ENFILE || ec.value() == ENOBUFS ||
         ec.value() == ENOMEM;
}

class TcpServer final : public Server {
 public:
  explicit TcpServer(ServerOptions options) : state_(std::make_shared<ServerState>()) {
    state_->options = std::move(options);
  }
  ~TcpServer() override { Stop(std::chrono::milliseconds(0)); }

  Status Open();  // listens

  void Route(std::string method, const std::string& pattern, Handler handler) override {
    state_->router.Add(std::move(method), pattern, std::move(handler));
  }
  Status Start() override;
  int port() const override { return port_; }
  void Stop(std::chrono::milliseconds grace) override;

 private:
  Status Listen(const Tcp::endpoint& endpoint);
  void Accept();
  void OnAccepted(const error_code& ec, Socket socket);
  void ForEachConnection(void (Connection::*method)());
  bool WaitUntilClosed(std::chrono::milliseconds timeout);

  const std::shared_ptr<ServerState> state_;
  const Strand strand_ = asio::make_strand(state_->io);  // of the acceptor and its timer
  Acceptor acceptor_{strand_};
  Timer accept_timer_{strand_};
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work_;
  std::vector<std::thread> threads_;
  int port_ = 0;
};

Status TcpServer::Open() {
  const ServerOptions& options = state_->options;
  if (options.port < 0 || options.port > 65535) {
    return InvalidArgument(fmt::format("--port must be 0 to 65535, got {}", options.port));
  }
  error_code ec;
  asio::ip::basic_resolver<Tcp, Strand> resolver(strand_);
  const auto found = resolver.resolve(options.host, std::to_string(options.port),
                                      Tcp::resolver::passive | Tcp::resolver::numeric_service, ec);
  if (ec || found.empty()) {
    return InvalidArgument(
        fmt::format("--host {} is no address or name known here: {}", options.host, ec.message()));
  }
  return Listen(found.begin()->endpoint());
}

Status TcpServer::Start() {
  RETURN_IF_ERROR(Open());
  work_.emplace(state_->io.get_executor());
  for (int i = 0; i < state_->options.num_threads; ++i) {
    threads_.emplace_back([state = state_] { state->io.run(); });
  }
  asio::post(strand_, [this] { Accept(); });
  return OkStatus();
}

Status TcpServer::Listen(const Tcp::endpoint& endpoint) {
  error_code ec;
  acceptor_.open(endpoint.protocol(), ec);
  if (!ec) acceptor_.set_option(Acceptor::reuse_address(true), ec);
  if (!ec && endpoint.protocol() == Tcp::v6()) acceptor_.set_option(asio::ip::v6_only(false), ec);
  if (!ec) acceptor_.bind(endpoint, ec);
  if (!ec) acceptor_.listen(asio::socket_base::max_listen_connections, ec);
  if (ec) return ListenError(state_->options.host, state_->options.port, ec);
  port_ = acceptor_.local_endpoint(ec).port();
  return OkStatus();
}

void TcpServer::Accept() {
  if (!acceptor_.is_open()) return;
  acceptor_.async_accept(
      asio::make_strand(state_->io),
      [this](const error_code& ec, Socket socket) { OnAccepted(ec, std::move(socket)); });
}

void TcpServer::OnAccepted(const error_code& ec, Socket socket) {
  if (IsOutOfResources(ec)) {
    LogWarning("no more connections are accepted for now: {}; raise the limit with ulimit -n",
               ec.message());
    accept_timer_.expires_after(kAcceptPause);
    return accept_timer_.async_wait([this](const error_code&) { Accept(); });
  }
  if (!ec) {
    auto connection = std::make_shared<Connection>(std::move(socket), state_);
    bool stopping = false;
    {
      const std::lock_guard lock(state_->mutex);
      stopping = state_->stopping;
      if (!stopping) state_->connections.emplace(connection.get(), connection);
    }
    if (!stopping) connection->Start();
  }
  Accept();
}

void TcpServer::ForEachConnection(void (Connection::*method)()) {
  std::vector<std::shared_ptr<Connection>> connections;
  {
    const std::lock_guard lock(state_->mutex);
    for (const auto& [key, weak] : state_->connections) {
      if (auto connection = weak.lock()) connections.push_back(std::move(connection));
    }
  }
  for (const auto& connection : connections) (connection.get()->*method)();
}

bool TcpServer::WaitUntilClosed(std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  return state_->closed.wait_for(lock, timeout, [&] { return state_->connections.empty(); });
}

void TcpServer::Stop(std::chrono::milliseconds grace) {
  if (threads_.empty()) return;
  asio::post(strand_, [this] {
    error_code ec;
    acceptor_.close(ec);
    accept_timer_.cancel();
  });
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  ForEachConnection(&Connection::StopWhenIdle);
  if (!WaitUntilClosed(grace)) {
    ForEachConnection(&Connection::Cut);
    WaitUntilClosed(kCutTime);
  }
  // Without its guard run() returns when nothing is left to do: no connection, no timer, no post.
  work_.reset();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace

std::unique_ptr<Server> Server::Create(ServerOptions options) {
  return std::make_unique<TcpServer>(std::move(options));
}

Status CheckAddress(const std::string& host, int port) {
  ServerOptions options;
  options.host = host;
  options.port = port;
  return TcpServer(std::move(options)).Open();
}

}  // namespace fathom::http
