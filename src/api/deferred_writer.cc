#include "api/deferred_writer.h"

#include <string>
#include <utility>

namespace fathom::api {

void DeferredWriter::Do(std::function<void()> operation) {
  {
    const std::lock_guard lock(mutex_);
    if (!released_) return kept_.push_back(std::move(operation));
  }
  operation();
}

void DeferredWriter::Release() {
  writer_->Post([self = shared_from_this()] { self->RunKept(); });
}

void DeferredWriter::RunKept() {
  while (true) {
    std::vector<std::function<void()>> operations;
    {
      const std::lock_guard lock(mutex_);
      released_ = kept_.empty();
      if (released_) return;
      operations.swap(kept_);
    }
    for (const std::function<void()>& operation : operations) operation();
  }
}

void DeferredWriter::Send(http::Response response) {
  Do([w = writer_.get(), r = std::move(response)]() mutable { w->Send(std::move(r)); });
}

void DeferredWriter::BeginStream(http::Response head) {
  Do([w = writer_.get(), h = std::move(head)]() mutable { w->BeginStream(std::move(h)); });
}

void DeferredWriter::Write(std::string_view data) {
  Do([w = writer_.get(), d = std::string(data)] { w->Write(d); });
}

void DeferredWriter::End() {
  Do([w = writer_.get()] { w->End(); });
}

void DeferredWriter::SetKeepAlive(std::chrono::milliseconds interval, std::string text) {
  Do([w = writer_.get(), interval, t = std::move(text)] { w->SetKeepAlive(interval, t); });
}

void DeferredWriter::KeepWholeAlive(std::chrono::milliseconds interval, http::Response head) {
  Do([w = writer_.get(), interval, h = std::move(head)] { w->KeepWholeAlive(interval, h); });
}

void DeferredWriter::OnDisconnect(std::function<void()> callback) {
  Do([w = writer_.get(), c = std::move(callback)]() mutable { w->OnDisconnect(std::move(c)); });
}

void DeferredWriter::Post(std::function<void()> function) {
  {
    const std::lock_guard lock(mutex_);
    if (!released_) return kept_.push_back(std::move(function));
  }
  writer_->Post(std::move(function));
}

}  // namespace fathom::api
