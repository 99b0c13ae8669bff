// Executor: runs a step on all ranks: one batch for each data rank, which the ranks of every stage
// and tensor rank of that data rank run together. Used by one thread, the engine's.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "base/status.h"
#include "request/scheduled_batch.h"

namespace fathom::runtime {

class Executor {
 public:
  virtual ~Executor() = default;

  // Begins a step: batches[d] is data rank d's, and may be empty. As many as max_in_flight may be
  // started and not waited for. Batches live until their Wait has returned, what they view until
  // the Wait after their Start.
  virtual Status Start(std::span<const request::ScheduledBatch> batches) = 0;

  // The results of the oldest step that was started, by data rank. An error, of any rank, is a
  // device's, a peer's or our own: nothing can be run after it.
  virtual Result<std::vector<request::StepResult>> Wait() = 0;

  virtual int max_in_flight() const = 0;

  // Begins to watch for failures between steps: once, and before the first Start. `tell` is called
  // once at most, on any thread, when nothing can be run any more.
  virtual void Watch(const std::function<void(const Status&)>& /*tell*/) {}
};

}  // namespace fathom::runtime
