// Connection: one client's socket, private to http/ (it includes Asio). Everything runs on the
// connection's strand but Start, StopWhenIdle and Cut. One exchange at a time: a request is read,
// dispatched, and the next one waits until the answer is handed to the kernel. While an answer is
// being made the socket is still read (up to a bound of pipelined bytes), so that a client that
// leaves is noticed at once.
#pragma once

#include <boost/asio/basic_stream_socket.hpp>
#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/strand.hpp>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"
#include "http/request_parser.h"
#include "http/router.h"
#include "http/server.h"

namespace fathom::http {

namespace asio = boost::asio;
using Tcp = asio::ip::tcp;
using Strand = asio::strand<asio::io_context::executor_type>;
using Socket = asio::basic_stream_socket<Tcp, Strand>;
using Timer = asio::basic_waitable_timer<std::chrono::steady_clock,
                                         asio::wait_traits<std::chrono::steady_clock>, Strand>;

class Connection;

// What the connections of a server share. Outlives them.
struct ServerState {
  ServerOptions options;  // constant after Start, as is the router
  Router router;
  asio::io_context io;

  std::mutex mutex;  // guards the rest
  std::condition_variable closed;
  std::unordered_map<Connection*, std::weak_ptr<Connection>> connections;
  bool stopping = false;
};

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Socket socket, std::shared_ptr<ServerState> state);

  void Start();         // any thread, once
  void StopWhenIdle();  // any thread: the exchange in progress is the last
  void Cut();           // any thread

  // The answer of the exchange in progress; called by its writer.
  void SendResponse(Response response);
  void BeginStream(Response head);
  void WriteStream(std::string_view data);
  void EndStream();
  void AbandonExchange();
  void SetKeepAlive(std::chrono::milliseconds interval, std::string text);
  void KeepWholeAlive(std::chrono::milliseconds interval, Response head);
  void SetDisconnectCallback(std::function<void()> callback);
  void Post(std::function<void()> function);  // any thread

 private:
  // Input.
  void WaitReadable();
  void OnReadable();
  void ProcessInput();
  bool OnHeaderComplete();  // false: the request was refused, and answered
  std::optional<Response> Refusal();
  void Dispatch();
  void RefuseAndClose(int status, std::string_view message);
  Response ErrorResponse(int status, std::string_view message);

  // Output.
  void QueueHead(const Response& head, std::optional<size_t> content_length);
  void Flush();
  void WriteSome();
  void OnWritten(size_t num_bytes);
  void FinishExchange();
  void RecordExchange(int status);

  // Time and end.
  std::optional<TimePoint> ReadDeadline() const;
  void ArmTimer();
  void OnTimer();
  void OnReadTimeout();
  void SendKeepAlive();
  void Linger();
  void Disconnect();

  const std::shared_ptr<ServerState> state_;  // before socket_: the io_context goes last
  const Limits& limits_;
  Socket socket_;
  Timer timer_;
  bool timer_armed_ = false;
  std::string peer_;
  bool closed_ = false;
  bool reading_paused_ = false;
  bool lingering_ =
      false;  // all is answered; reads until the client closes, so that it gets the answer
  bool close_after_ = false;  // this exchange is the last
  TimePoint phase_since_;     // when the parser's phase, or lingering, began

  std::string input_;  // received, not yet consumed by the parser
  std::unique_ptr<RequestParser> parser_;
  const Router::Route* route_ = nullptr;

  // The exchange in progress.
  bool busy_ = false;
  std::string method_;
  std::string route_pattern_;
  bool is_http_1_0_ = false;
  int status_ = 0;
  bool response_complete_ = false;
  TimePoint exchange_start_;
  std::function<void()> on_disconnect_;
  std::chrono::milliseconds keep_alive_interval_{0};
  std::string keep_alive_text_;
  std::optional<Response> whole_head_;  // of a whole answer that is kept alive; not sent yet
  int whole_status_ = 0;                // sent: that of whole_head_
  TimePoint last_write_;

  std::string in_flight_;  // being written
  size_t in_flight_sent_ = 0;
  std::string queued_;  // follows it
  TimePoint last_progress_;
};

}  // namespace fathom::http
