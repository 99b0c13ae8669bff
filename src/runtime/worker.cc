#include "runtime/worker.h"

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"

namespace fathom::runtime {
namespace {

// Exceptions end here: across threads they are a Status.
template <typename Run>
auto WithoutExceptions(const Run& run) -> decltype(run()) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return OutOfMemory("a step ran out of host memory: lower --max-num-batched-tokens");
  } catch (const std::exception& e) {
    return InternalError(std::string("a step failed: ") + e.what());
  }
}

Status StatusOf(const Status& status) { return status; }
Status StatusOf(const Result<request::StepResult>& result) { return result.status(); }

}  // namespace

Worker::Worker(std::unique_ptr<ModelRunner> runner, comm::Transport* transport, Tell tell)
    : runner_(std::move(runner)),
      transport_(transport),
      tell_(std::move(tell)),
      thread_([this] { RunThread(); }) {}

Worker::~Worker() {
  commands_.Close();
  thread_.join();
}

void Worker::Start(const request::ScheduledBatch& batch) { CHECK(commands_.TryPush(&batch)); }

void Worker::Collect() { CHECK(commands_.TryPush(nullptr)); }

template <typename Run>
auto Worker::RunOrAbort(const Run& run) -> decltype(run()) {
  auto result = WithoutExceptions(run);
  const Status status = StatusOf(result);
  if (!status.ok() && transport_ != nullptr) transport_->Abort(status);
  return result;
}

void Worker::RunThread() {
  Status launched;
  while (const auto batch = commands_.Pop()) {
    if (*batch != nullptr) {
      if (launched.ok()) launched = RunOrAbort([&] { return runner_->Launch(**batch); });
    } else if (launched.ok()) {
      tell_(RunOrAbort([&] { return runner_->Collect(); }));
    } else {
      tell_(launched);
    }
  }
}

}  // namespace fathom::runtime
