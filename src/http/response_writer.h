// ResponseWriter: the answer to one request, whole or as a stream. Made by the server, shared by
// whatever works on the answer. Post may be called on any thread; everything else on the
// connection's executor, which is where the handler, posted functions and the disconnect callback
// run, one at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "http/message.h"

namespace fathom::http {

class ResponseWriter {
 public:
  // A writer dropped without a complete answer answers 500, or cuts a begun stream.
  virtual ~ResponseWriter() = default;

  // The whole answer. Nothing may follow.
  virtual void Send(Response response) = 0;

  // Begins a stream: `head` without its body. Then any number of Write and one End.
  virtual void BeginStream(Response head) = 0;
  // Sent at once, or buffered while the client is slow; a client too far behind is disconnected.
  // No-op after a disconnect.
  virtual void Write(std::string_view data) = 0;
  virtual void End() = 0;
  // Writes `text` whenever the stream has been silent for `interval`.
  virtual void SetKeepAlive(std::chrono::milliseconds interval, std::string text) = 0;
  // For an answer that is sent whole: if Send has not come after `interval`, `head` is sent and a
  // newline every `interval` (JSON may begin with them). What is sent then must have head's status;
  // an answer with another status cuts the connection, so that no client takes it for a success.
  virtual void KeepWholeAlive(std::chrono::milliseconds interval, Response head) = 0;

  // Called once if the client goes away before the answer is complete, also while nothing is being
  // written.
  virtual void OnDisconnect(std::function<void()> callback) = 0;

  virtual void Post(std::function<void()> function) = 0;
};

// Runs on the connection's executor; must not block. It answers through the writer, now or later.
using Handler = std::function<void(Request request, std::shared_ptr<ResponseWriter> writer)>;

}  // namespace fathom::http
