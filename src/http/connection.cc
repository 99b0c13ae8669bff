#include "http/connection.h"

#include <fmt/format.h>

#include <array>
#include <boost/asio/post.hpp>
#include <exception>
#include <utility>

#include "base/log.h"

namespace fathom::http {
namespace {

using boost::system::error_code;

constexpr std::chrono::seconds kLingerTime{2};
constexpr size_t kReadBytes = 64 << 10;

// What a handler throws (out of memory, say) ends its exchange, not the process.
void RunGuarded(const std::function<void()>& function) {
  try {
    function();
  } catch (const std::exception& e) {
    LogError("a request handler failed: {}", e.what());
  }
}

class ExchangeWriter final : public ResponseWriter {
 public:
  explicit ExchangeWriter(std::shared_ptr<Connection> connection)
      : connection_(std::move(connection)) {}
  ~ExchangeWriter() override {
    if (!done_) connection_->Post([c = connection_.get()] { c->AbandonExchange(); });
  }

  void Send(Response response) override {
    if (!std::exchange(done_, true)) connection_->SendResponse(std::move(response));
  }
  void BeginStream(Response head) override {
    if (!done_) connection_->BeginStream(std::move(head));
  }
  void Write(std::string_view data) override {
    if (!done_) connection_->WriteStream(data);
  }
  void End() override {
    if (!std::exchange(done_, true)) connection_->EndStream();
  }
  void SetKeepAlive(std::chrono::milliseconds interval, std::string text) override {
    if (!done_) connection_->SetKeepAlive(interval, std::move(text));
  }
  void OnDisconnect(std::function<void()> callback) override {
    if (!done_) connection_->SetDisconnectCallback(std::move(callback));
  }
  void KeepWholeAlive(std::chrono::milliseconds interval, Response head) override {
    if (!done_) connection_->KeepWholeAlive(interval, std::move(head));
  }
  void Post(std::function<void()> function) override { connection_->Post(std::move(function)); }

 private:
  const std::shared_ptr<Connection> connection_;
  bool done_ = false;
};

std::string PeerName(const Socket& socket) {
  error_code ec;
  const Tcp::endpoint endpoint = socket.remote_endpoint(ec);
  return ec ? "" : fmt::format("{}:{}", endpoint.address().to_string(), endpoint.port());
}

}  // namespace

Connection::Connection(Socket socket, std::shared_ptr<ServerState> state)
    : state_(std::move(state)),
      limits_(state_->options.limits),
      socket_(std::move(socket)),
      timer_(socket_.get_executor()),
      peer_(PeerName(socket_)),
      phase_since_(std::chrono::steady_clock::now()),
      parser_(std::make_unique<RequestParser>(limits_)) {}

void Connection::Post(std::function<void()> function) {
  // After the server's end nobody would run it: it would wait in `io` for good, which it keeps.
  if (state_->io.stopped()) return;
  asio::post(socket_.get_executor(),
             [self = shared_from_this(), f = std::move(function)] { RunGuarded(f); });
}

void Connection::Start() {
  Post([this] {
    if (closed_) return;
    error_code ec;
    socket_.non_blocking(true, ec);
    socket_.set_option(Tcp::no_delay(true), ec);
    WaitReadable();
    ArmTimer();
  });
}

void Connection::StopWhenIdle() {
  Post([this] {
    close_after_ = true;
    const bool idle =
        !busy_ && !lingering_ && input_.empty() && parser_->phase() == RequestParser::Phase::kStart;
    if (idle) Disconnect();
  });
}

void Connection::Cut() {
  Post([this] { Disconnect(); });
}

void Connection::WaitReadable() {
  if (closed_) return;
  // Too much pipelined: the rest stays in the kernel until this exchange is over.
  reading_paused_ = busy_ && input_.size() > static_cast<size_t>(limits_.max_pipelined_bytes);
  if (reading_paused_) return;
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](const error_code& ec) {
    if (!self->closed_) ec ? self->Disconnect() : self->OnReadable();
  });
}

void Connection::OnReadable() {
  std::array<char, kReadBytes> buffer;
  error_code ec;
  const size_t n = socket_.read_some(asio::buffer(buffer), ec);
  if (ec == asio::error::would_block || ec == asio::error::interrupted) return WaitReadable();
  if (ec) return Disconnect();
  if (!lingering_) {
    input_.append(buffer.data(), n);
    ProcessInput();
  }
  WaitReadable();
  ArmTimer();
}

void Connection::ProcessInput() {
  using Phase = RequestParser::Phase;
  while (!closed_ && !busy_ && !lingering_) {
    const Phase before = parser_->phase();
    const size_t used = parser_->Feed(input_);
    input_.erase(0, used);
    if (parser_->error()) {
      return RefuseAndClose(parser_->error()->status, parser_->error()->message);
    }
    const Phase after = parser_->phase();
    if (before != after) phase_since_ = std::chrono::steady_clock::now();
    if (before < Phase::kBody && after >= Phase::kBody && !OnHeaderComplete()) return;
    if (after == Phase::kDone) {
      Dispatch();
    } else if (used == 0 && before == after) {
      return;
    }
  }
}

bool Connection::OnHeaderComplete() {
  Request& request = parser_->request();
  request.peer = peer_;
  route_ = state_->router.Find(&request);
  method_ = request.method;
  route_pattern_ = request.route;
  is_http_1_0_ = parser_->is_http_1_0();
  exchange_start_ = phase_since_;
  if (!parser_->keep_alive()) close_after_ = true;
  const bool has_body = parser_->phase() != RequestParser::Phase::kDone;
  if (std::optional<Response> refusal = Refusal()) {
    if (has_body) close_after_ = true;
    busy_ = true;
    SendResponse(*std::move(refusal));
    return false;
  }
  if (has_body && parser_->expects_continue() && input_.empty()) {
    queued_ += "HTTP/1.1 100 Continue\r\n\r\n";
    Flush();
  }
  return true;
}

std::optional<Response> Connection::Refusal() {
  const Request& request = parser_->request();
  if (request.method == "OPTIONS") {
    const std::string allow = route_ ? route_->AllowedMethods() : "GET, HEAD, POST, OPTIONS";
    return Response{.status = 204, .content_type = "", .headers = {{"Allow", allow}}, .body = ""};
  }
  if (state_->options.admit) {
    if (std::optional<Response> refusal = state_->options.admit(request)) return refusal;
  }
  if (route_ == nullptr) {
    return ErrorResponse(404, fmt::format("there is no route {} {}", request.method, request.path));
  }
  if (route_->FindHandler(request.method) == nullptr) {
    Response response =
        ErrorResponse(405, fmt::format("{} does not answer {}; it answers {}", request.path,
                                       request.method, route_->AllowedMethods()));
    response.headers.push_back({"Allow", route_->AllowedMethods()});
    return response;
  }
  const std::string* encoding = request.FindHeader("Content-Encoding");
  if (encoding != nullptr && !EqualsIgnoringCase(*encoding, "identity")) {
    return ErrorResponse(415, "compressed request bodies are not accepted: send the body as it is");
  }
  return std::nullopt;
}

void Connection::Dispatch() {
  busy_ = true;
  auto writer = std::make_shared<ExchangeWriter>(shared_from_this());
  const Handler& handler = *route_->FindHandler(method_);
  RunGuarded([&] { handler(std::move(parser_->request()), std::move(writer)); });
}

Response Connection::ErrorResponse(int status, std::string_view message) {
  if (state_->options.error_response) {
    return state_->options.error_response(status, message, parser_->request());
  }
  return {
      .status = status, .content_type = "text/plain", .headers = {}, .body = std::string(message)};
}

void Connection::RefuseAndClose(int status, std::string_view message) {
  method_ = parser_->request().method;
  route_pattern_ = parser_->request().route;
  exchange_start_ = phase_since_;
  close_after_ = true;
  busy_ = true;
  SendResponse(ErrorResponse(status, message));
}

std::optional<TimePoint> Connection::ReadDeadline() const {
  if (lingering_) return phase_since_ + kLingerTime;
  if (busy_) return std::nullopt;
  switch (parser_->phase()) {
    case RequestParser::Phase::kStart:
      return phase_since_ + limits_.idle_timeout;
    case RequestParser::Phase::kHeader:
      return phase_since_ + limits_.header_timeout;
    default: {
      // The grace, and then as long as what has come would take at the slowest rate allowed.
      const auto received = static_cast<int64_t>(parser_->request().body.size());
      return phase_since_ + limits_.body_grace +
             std::chrono::milliseconds(received * 1000 / limits_.min_body_bytes_per_second);
    }
  }
}

void Connection::ArmTimer() {
  if (closed_) return;
  TimePoint next = TimePoint::max();
  if (const auto deadline = ReadDeadline()) next = *deadline;
  if (!in_flight_.empty()) next = std::min(next, last_progress_ + limits_.write_stall_timeout);
  if (keep_alive_interval_.count() > 0) next = std::min(next, last_write_ + keep_alive_interval_);
  if (next == TimePoint::max() || (timer_armed_ && timer_.expiry() <= next)) return;
  timer_armed_ = true;
  timer_.expires_at(next);
  timer_.async_wait([self = shared_from_this()](const error_code& ec) {
    if (ec || self->closed_) return;  // replaced by an earlier one, or the end
    self->timer_armed_ = false;
    self->OnTimer();
  });
}

void Connection::OnTimer() {
  const TimePoint now = std::chrono::steady_clock::now();
  const auto read_deadline = ReadDeadline();
  if (!in_flight_.empty() && now >= last_progress_ + limits_.write_stall_timeout)
    return Disconnect();
  if (read_deadline && now >= *read_deadline) OnReadTimeout();
  if (!closed_ && keep_alive_interval_.count() > 0 && now >= last_write_ + keep_alive_interval_) {
    SendKeepAlive();
  }
  ArmTimer();
}

void Connection::SendKeepAlive() {
  if (whole_head_) {
    whole_status_ = whole_head_->status;
    BeginStream(*std::exchange(whole_head_, std::nullopt));
  }
  WriteStream(std::string(keep_alive_text_));
}

void Connection::OnReadTimeout() {
  if (lingering_ || parser_->phase() == RequestParser::Phase::kStart) return Disconnect();
  RefuseAndClose(408, "the request did not arrive in time");
}

void Connection::Linger() {
  error_code ec;
  socket_.shutdown(Socket::shutdown_send, ec);
  lingering_ = true;
  input_.clear();
  phase_since_ = std::chrono::steady_clock::now();
  ArmTimer();
}

void Connection::Disconnect() {
  if (std::exchange(closed_, true)) return;
  error_code ec;
  socket_.close(ec);
  timer_.cancel();
  if (busy_) {
    RecordExchange(499);
    // Posted: the owner of the answer may be in the middle of a Write.
    if (on_disconnect_) Post(std::exchange(on_disconnect_, nullptr));
  }
  const std::lock_guard lock(state_->mutex);
  state_->connections.erase(this);
  state_->closed.notify_all();
}

}  // namespace fathom::http
