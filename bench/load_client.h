// LoadClient: many keep-alive connections to one HTTP server from one thread, each sending the same
// request again and again. Measures what a client sees: when each answer was complete and when each
// server-sent event arrived.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace fathom::bench {

struct Connection {
  int fd = -1;
  size_t idx = 0;
  std::string received;   // of the answer in progress
  size_t scanned = 0;     // of it
  size_t num_events = 0;  // "data: " lines in it
  size_t body_begin = 0;  // 0: its head is not complete
  size_t length = 0;      // of its body; 0: in chunks
  TimePoint sent;         // when its request was sent
  int64_t num_answers = 0;
};

class LoadClient {
 public:
  struct Callbacks {
    // The bytes of one event's data; `event_idx` counts within its answer. May be null.
    std::function<void(const Connection&, size_t event_idx, std::string_view data)> on_event;
    // The whole answer; return true to send the request again.
    std::function<bool(const Connection&)> on_answer;
  };

  // Connects `num_connections` to the port of 127.0.0.1. `request_of` gives a connection's request.
  LoadClient(int port, size_t num_connections,
             const std::function<std::string(size_t connection_idx)>& request_of);
  ~LoadClient();
  LoadClient(const LoadClient&) = delete;
  LoadClient& operator=(const LoadClient&) = delete;

  // Sends every connection's request and runs until no connection waits for an answer.
  void Run(const Callbacks& callbacks);

 private:
  void Send(Connection& connection);
  // False: the connection is done.
  bool Read(Connection& connection, const Callbacks& callbacks);
  static void ReadHead(Connection& connection);
  // Whether the answer is complete: by its length, or by the last chunk.
  static bool IsComplete(const Connection& connection);

  int epoll_fd_ = -1;
  std::vector<Connection> connections_;
  std::vector<std::string> requests_;
};

}  // namespace fathom::bench
