// Generation: the sequences of one HTTP request, from Submit to the last delta. Engine events cross
// from the engine thread to the connection's executor through one bounded queue; there they become
// deltas for the listener. A client that leaves cancels all sequences at once, in every phase.
//
// Start and the listener run on the connection's executor. The engine's sinks keep the generation
// alive, it keeps the listener alive until the end.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "api/api_error.h"
#include "api/choice_text.h"
#include "base/bounded_queue.h"
#include "engine/engine.h"
#include "http/response_writer.h"

namespace fathom::api {

class GenerationListener {
 public:
  virtual ~GenerationListener() = default;
  // Called until every choice has finished once, or OnError.
  virtual void OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) = 0;
  virtual void OnError(ApiError error) = 0;  // ends everything
};

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  struct Choice {
    request::Request request;
    ChoiceText text;
  };

  Generation(engine::Engine* engine, std::vector<Choice> choices,
             std::shared_ptr<http::ResponseWriter> writer,
             std::shared_ptr<GenerationListener> listener);

  // Submits every choice; none stays behind when one is refused. The listener is called later.
  MaybeError Start();

 private:
  struct IndexedEvent {
    size_t choice_idx;
    request::TokenEvent event;
  };
  class Sink;

  void Enqueue(size_t choice_idx, request::TokenEvent event);  // engine thread
  void PostDrain();
  void Drain();
  void Handle(IndexedEvent indexed);
  void Fail(ApiError error);
  void CancelUnfinished();

  engine::Engine* const engine_;
  struct Sequence {
    request::RequestId id;
    ChoiceText text;
    bool finished = false;
  };
  std::vector<Choice> choices_;  // until Start
  std::vector<Sequence> sequences_;
  size_t num_finished_ = 0;
  const std::shared_ptr<http::ResponseWriter> writer_;
  std::shared_ptr<GenerationListener> listener_;  // null: over
  BoundedQueue<IndexedEvent> events_;
  std::atomic<bool> drain_posted_{false};
  std::atomic<bool> overflowed_{false};
};

}  // namespace fathom::api
