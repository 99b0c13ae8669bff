#include "api/generation.h"

#include <utility>

namespace fathom::api {
namespace {

// Steps that the executor may be behind, over all choices. Far more than a healthy server ever is.
constexpr size_t kMaxPendingEvents = 16'384;
// Events handled before the connection's other work (its writes) gets a turn.
constexpr int kMaxEventsPerTurn = 64;

}  // namespace

using request::FinishReason;
using request::TokenEvent;

class Generation::Sink final : public request::TokenSink {
 public:
  Sink(std::shared_ptr<Generation> generation, size_t choice_idx)
      : generation_(std::move(generation)), choice_idx_(choice_idx) {}
  void OnEvent(TokenEvent event) override { generation_->Enqueue(choice_idx_, std::move(event)); }

 private:
  const std::shared_ptr<Generation> generation_;
  const size_t choice_idx_;
};

Generation::Generation(engine::Engine* engine, std::vector<Choice> choices,
                       std::shared_ptr<http::ResponseWriter> writer,
                       std::shared_ptr<GenerationListener> listener)
    : engine_(engine),
      choices_(std::move(choices)),
      writer_(std::move(writer)),
      listener_(std::move(listener)),
      events_(kMaxPendingEvents) {}

MaybeError Generation::Start() {
  std::vector<request::Request> requests;
  for (Choice& choice : choices_) {
    sequences_.push_back({choice.request.id, std::move(choice.text)});
    requests.push_back(std::move(choice.request));
  }
  choices_.clear();
  for (size_t i = 0; i < requests.size(); ++i) {
    const Status status =
        engine_->Submit(std::move(requests[i]), std::make_shared<Sink>(shared_from_this(), i));
    if (status.ok()) continue;
    for (size_t j = 0; j < i; ++j) engine_->Cancel(sequences_[j].id);
    listener_.reset();
    return FromStatus(status);
  }
  writer_->OnDisconnect([self = shared_from_this()] {
    self->CancelUnfinished();
    self->listener_.reset();
  });
  return std::nullopt;
}

void Generation::Enqueue(size_t choice_idx, TokenEvent event) {
  if (!events_.TryPush({choice_idx, std::move(event)})) overflowed_ = true;
  PostDrain();
}

void Generation::PostDrain() {
  if (!drain_posted_.exchange(true)) writer_->Post([self = shared_from_this()] { self->Drain(); });
}

void Generation::Drain() {
  drain_posted_ = false;  // before the queue is read: what comes after it posts anew
  std::optional<IndexedEvent> event;
  for (int i = 0; i < kMaxEventsPerTurn && listener_ != nullptr; ++i) {
    event = events_.TryPop();
    if (!event) break;
    Handle(*std::move(event));
  }
  if (event) PostDrain();  // there may be more
  if (listener_ != nullptr && overflowed_) {
    Fail({.status = 503,
          .message = "The server is too busy to deliver the answer.",
          .param = "",
          .code = "server_overloaded"});
  }
}

void Generation::Handle(IndexedEvent indexed) {
  Sequence& sequence = sequences_[indexed.choice_idx];
  if (sequence.finished) return;  // a stop string ended it before the engine did
  const std::optional<FinishReason> reason = indexed.event.finish_reason;
  if (reason == FinishReason::kError) return Fail(FromStatus(indexed.event.error));
  if (reason == FinishReason::kCancelled) {
    return Fail(FromStatus({StatusCode::kCancelled, "cancelled by the engine"}));
  }
  ChoiceDelta delta = sequence.text.Push(std::move(indexed.event));
  if (delta.finish) {
    sequence.finished = true;
    ++num_finished_;
    if (!reason) engine_->Finish(sequence.id, FinishReason::kStop);  // a stop string
  }
  const std::shared_ptr<GenerationListener> listener = listener_;
  if (num_finished_ == sequences_.size()) listener_.reset();
  listener->OnDelta(indexed.choice_idx, sequence.text, std::move(delta));
}

void Generation::Fail(ApiError error) {
  CancelUnfinished();
  std::exchange(listener_, nullptr)->OnError(std::move(error));
}

void Generation::CancelUnfinished() {
  for (Sequence& sequence : sequences_) {
    if (!std::exchange(sequence.finished, true)) engine_->Cancel(sequence.id);
  }
}

}  // namespace fathom::api
