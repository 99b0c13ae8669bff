// The output half of Connection: heads, chunks, the write queue, the end of an exchange.
#include <fmt/format.h>

#include <boost/asio/post.hpp>
#include <ctime>
#include <utility>

#include "http/connection.h"

namespace fathom::http {
namespace {

using boost::system::error_code;

std::string HttpDate() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[64];
  const size_t n = std::strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &utc);
  return {text, n};
}

}  // namespace

void Connection::QueueHead(const Response& head, std::optional<size_t> content_length) {
  status_ = head.status;
  queued_ += fmt::format("HTTP/1.1 {} {}\r\nDate: {}\r\n", head.status, ReasonPhrase(head.status),
                         HttpDate());
  if (!head.content_type.empty()) queued_ += "Content-Type: " + head.content_type + "\r\n";
  for (const Header& header : head.headers) queued_ += header.name + ": " + header.value + "\r\n";
  if (content_length) {
    if (head.status != 204) queued_ += fmt::format("Content-Length: {}\r\n", *content_length);
  } else if (is_http_1_0_) {
    close_after_ = true;  // the end of the connection is the end of the body
  } else {
    queued_ += "Transfer-Encoding: chunked\r\n";
  }
  if (close_after_) {
    queued_ += "Connection: close\r\n";
  } else if (is_http_1_0_) {
    queued_ += "Connection: keep-alive\r\n";
  }
  queued_ += "\r\n";
}

void Connection::SendResponse(Response response) {
  if (closed_) return;
  if (whole_status_ != 0) {
    if (response.status != whole_status_) return Disconnect();
    WriteStream(response.body);
    return EndStream();
  }
  whole_head_.reset();
  keep_alive_interval_ = {};
  QueueHead(response, response.body.size());
  if (method_ != "HEAD") queued_ += response.body;
  response_complete_ = true;
  Flush();
}

void Connection::BeginStream(Response head) {
  if (closed_) return;
  QueueHead(head, std::nullopt);
  Flush();
}

void Connection::WriteStream(std::string_view data) {
  if (closed_ || data.empty()) return;
  if (queued_.size() > static_cast<size_t>(limits_.max_write_buffer_bytes)) return Disconnect();
  if (is_http_1_0_) {
    queued_ += data;
  } else {
    fmt::format_to(std::back_inserter(queued_), "{:x}\r\n{}\r\n", data.size(), data);
  }
  last_write_ = std::chrono::steady_clock::now();
  Flush();
}

void Connection::EndStream() {
  if (closed_) return;
  if (!is_http_1_0_) queued_ += "0\r\n\r\n";
  response_complete_ = true;
  keep_alive_interval_ = {};
  Flush();
}

void Connection::AbandonExchange() {
  if (closed_ || response_complete_) return;
  if (status_ != 0) return Disconnect();  // a stream that has begun cannot turn into an error
  SendResponse(ErrorResponse(500, "the request could not be answered"));
}

void Connection::SetKeepAlive(std::chrono::milliseconds interval, std::string text) {
  keep_alive_interval_ = interval;
  keep_alive_text_ = std::move(text);
  last_write_ = std::chrono::steady_clock::now();
  ArmTimer();
}

void Connection::KeepWholeAlive(std::chrono::milliseconds interval, Response head) {
  if (closed_ || response_complete_) return;
  whole_head_ = std::move(head);
  SetKeepAlive(interval, "\n");
}

void Connection::SetDisconnectCallback(std::function<void()> callback) {
  if (closed_) return Post(std::move(callback));
  on_disconnect_ = std::move(callback);
}

void Connection::Flush() {
  if (closed_ || !in_flight_.empty() || queued_.empty()) return;
  in_flight_.swap(queued_);
  in_flight_sent_ = 0;
  last_progress_ = std::chrono::steady_clock::now();
  WriteSome();
  ArmTimer();
}

void Connection::WriteSome() {
  socket_.async_write_some(
      asio::buffer(in_flight_.data() + in_flight_sent_, in_flight_.size() - in_flight_sent_),
      [self = shared_from_this()](const error_code& ec, size_t n) {
        if (!self->closed_) ec ? self->Disconnect() : self->OnWritten(n);
      });
}

void Connection::OnWritten(size_t num_bytes) {
  in_flight_sent_ += num_bytes;
  last_progress_ = std::chrono::steady_clock::now();
  if (in_flight_sent_ < in_flight_.size()) return WriteSome();
  in_flight_.clear();
  Flush();
  if (in_flight_.empty() && response_complete_) FinishExchange();
}

void Connection::FinishExchange() {
  RecordExchange(status_);
  busy_ = false;
  response_complete_ = false;
  status_ = 0;
  on_disconnect_ = nullptr;
  keep_alive_interval_ = {};
  whole_head_.reset();
  whole_status_ = 0;
  in_flight_ = {};  // an idle connection holds no buffers
  queued_ = {};
  if (close_after_) {
    Linger();
    if (reading_paused_) WaitReadable();
    return;
  }
  parser_ = std::make_unique<RequestParser>(limits_);
  phase_since_ = std::chrono::steady_clock::now();
  ProcessInput();
  if (input_.empty()) input_ = {};
  if (reading_paused_) WaitReadable();
  ArmTimer();
}

void Connection::RecordExchange(int status) {
  if (!state_->options.on_exchange) return;
  state_->options.on_exchange(
      {.method = method_,
       .route = route_pattern_,
       .status = status,
       .seconds = Seconds(std::chrono::steady_clock::now() - exchange_start_)});
}

}  // namespace fathom::http
