// Resumable streams. A client that asks for one (header X-Resumable-Stream: true) gets an id with
// every event. If its connection breaks, the answer goes on being made for a short window, and a
// POST to the same route with the header Last-Event-ID gets what followed that event, and the rest.
// Without that header nothing here is used: a client that leaves ends its answer at once.
//
// An answer's events are kept up to a bound; what is older cannot be resumed. Ids cannot be
// guessed, and only the scope (the caller's key) that began a stream can resume it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"
#include "http/response_writer.h"

namespace fathom::api {

class ResumableStream;

class ResumableStreams {
 public:
  struct Options {
    std::chrono::milliseconds window{15'000};  // after the client left, or the end; 0: none is kept
    size_t max_streams = 256;
    size_t max_bytes = 4 << 20;  // of each
  };

  explicit ResumableStreams(const Options& options) : options_(options) {}

  // A writer whose stream can be resumed; `writer` itself when there are too many. Use it as any
  // other, on `writer`'s executor.
  std::shared_ptr<http::ResponseWriter> Begin(std::shared_ptr<http::ResponseWriter> writer,
                                              std::string scope);

  // Goes on after that event, on `writer`'s executor. False: unknown, over, or too long ago.
  bool Resume(std::string_view last_event_id, std::string_view scope,
              const std::shared_ptr<http::ResponseWriter>& writer);

 private:
  void DropExpired(TimePoint now);

  const Options options_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<ResumableStream>> streams_;  // by id; guarded
};

}  // namespace fathom::api
