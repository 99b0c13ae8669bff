// Server: HTTP/1.1 (and 1.0) on a TCP port. Knows paths and bytes, nothing of what they mean.
// Register routes, then Start; Stop from any thread. Keep-alive, pipelining, chunked bodies both
// ways, strict limits.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "http/limits.h"
#include "http/response_writer.h"

namespace fathom::http {

// One finished exchange, for metrics and logs.
struct ExchangeRecord {
  std::string_view method;
  std::string_view route;  // the matched pattern, or ""
  int status = 0;          // 499: the client left first
  double seconds = 0;      // from the complete header to the last byte handed over
};

struct ServerOptions {
  std::string host = "127.0.0.1";  // an address or a name; "0.0.0.0" and "::" are every interface
  int port = 0;                    // 0: any free one
  int num_threads = 2;
  Limits limits;
  // The body of an answer that the server itself gives (400, 404, 405, 408, 413, 415, 417, 431,
  // 500, 505). May add headers. Any thread.
  std::function<Response(int status, std::string_view message, const Request& request)>
      error_response;
  // Sees a request when its header is complete, its body not yet read; a value refuses it. Any
  // thread.
  std::function<std::optional<Response>(const Request&)> admit;
  std::function<void(const ExchangeRecord&)> on_exchange;  // any thread
};

class Server {
 public:
  static std::unique_ptr<Server> Create(ServerOptions options);
  virtual ~Server() = default;  // stops at once

  virtual void Route(std::string method, const std::string& pattern, Handler handler) = 0;
  // Listens and starts the threads. kInvalidArgument: the address cannot be used; says what to do.
  virtual Status Start() = 0;
  virtual int port() const = 0;
  // Accepts no more, closes idle connections, lets running answers end for at most `grace`, cuts
  // the rest (their disconnect callbacks run), and joins the threads. Idempotent.
  virtual void Stop(std::chrono::milliseconds grace) = 0;
};

// Whether a server could listen there now, as Start says it: for those who do what takes long
// first.
Status CheckAddress(const std::string& host, int port);

}  // namespace fathom::http
