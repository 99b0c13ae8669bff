// Engine: the loop thread between the API and the devices. Submit and Finish from any thread;
// everything else of a sequence's life happens on the loop thread. A step drains submissions and
// endings, asks the scheduler for a batch, runs it, commits the result and pushes token
// events. It formats no text.
#pragma once

#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/status.h"
#include "request/request.h"

namespace fathom::engine {

// What the engine tells about itself; a consistent copy, taken by the loop thread once a step.
struct EngineStats {
  int num_running = 0;
  int num_waiting = 0;
  double kv_cache_usage = 0;  // 0..1
  bool healthy = true;        // false once the loop has died
  Status error = OkStatus();  // why it has
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Queues the request; its events go to `sink`. kUnavailable: the queue is full or the engine
  // drains. kInvalidArgument: it could never fit (says the limit).
  virtual Status Submit(request::Request request, std::shared_ptr<request::TokenSink> sink) = 0;

  // Ends the request within a step, as `reason`; its sink gets that unless it had finished. kStop
  // is for a reader who found a stop string in the text. Unknown ids: no-op.
  virtual void Finish(request::RequestId id, request::FinishReason reason) = 0;
  void Cancel(request::RequestId id) { Finish(id, request::FinishReason::kCancelled); }

  // Refuses new requests, waits until the running ones have finished or `timeout` is over, then
  // cancels.
  virtual void Drain(Duration timeout) = 0;

  // Forgets all kept prefixes that no running request uses, in every tier. What is submitted after
  // this finds none.
  virtual void ResetPrefixCache() = 0;

  virtual EngineStats Stats() const = 0;
  virtual request::RequestId NextRequestId() = 0;
  // The longest prompt plus output that one sequence may have.
  virtual int64_t max_model_len() const = 0;
};

}  // namespace fathom::engine
