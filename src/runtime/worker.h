// Worker: the thread of one device. It runs batches in the order given; results come back in that
// order. The engine's thread starts steps and asks for what they gave; the ModelRunner is touched
// on the worker's thread alone. A step that fails ends the world of the device's rank, so that no
// other rank waits for it.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "base/bounded_queue.h"
#include "base/status.h"
#include "comm/transport.h"
#include "request/scheduled_batch.h"
#include "runtime/model_runner.h"

namespace fathom::runtime {

class Worker {
 public:
  // What a step gave. An error, or an exception made into one, is the device's or our own: nothing
  // can be run after it.
  using Tell = std::function<void(Result<request::StepResult>)>;

  // `transport`: the model's, to the other ranks; null: there are none. It outlives the worker.
  // `tell` is called on the worker's thread, once for each Collect.
  Worker(std::unique_ptr<ModelRunner> runner, comm::Transport* transport, Tell tell);
  ~Worker();  // waits for the step that runs
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Begins a step. As many as the runner's kMaxInFlight may be started and not collected; `batch`
  // must live until its result was told, and what it views until that of the Collect after its
  // Start.
  void Start(const request::ScheduledBatch& batch);

  // Asks for the result of the oldest step that was started, to be told when it has ended.
  void Collect();

 private:
  void RunThread();
  template <typename Run>
  auto RunOrAbort(const Run& run) -> decltype(run());

  std::unique_ptr<ModelRunner> runner_;
  comm::Transport* const transport_;
  const Tell tell_;
  // Null: the oldest step's result is wanted.
  BoundedQueue<const request::ScheduledBatch*> commands_{2 * ModelRunner::kMaxInFlight};
  std::thread thread_;
};

}  // namespace fathom::runtime
