#include "runtime/worker.h"

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"

namespace fathom::runtime {
namespace {

// Exceptions end here: across threads they are a Status.
Result<request::StepResult> RunBatch(ModelRunner& runner, const request::ScheduledBatch& batch) {
  try {
    return runner.Run(batch);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("a step ran out of host memory: lower --max-num-batched-tokens");
  } catch (const std::exception& e) {
    return InternalError(std::string("a step failed: ") + e.what());
  }
}

}  // namespace

Worker::Worker(std::unique_ptr<ModelRunner> runner)
    : runner_(std::move(runner)), thread_([this] { RunThread(); }) {}

Worker::~Worker() {
  batches_.Close();
  thread_.join();
}

void Worker::Start(const request::ScheduledBatch& batch) { CHECK(batches_.TryPush(&batch)); }

Result<request::StepResult> Worker::Wait() { return *results_.Pop(); }

void Worker::RunThread() {
  while (const auto batch = batches_.Pop()) {
    CHECK(results_.TryPush(RunBatch(*runner_, **batch)));
  }
}

}  // namespace fathom::runtime
