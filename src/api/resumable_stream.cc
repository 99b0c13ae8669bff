#include "api/resumable_stream.h"

#include <charconv>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "api/identifiers.h"

namespace fathom::api {

using http::ResponseWriter;
using std::chrono::steady_clock;

// Its answer is made on the first connection's executor, as any answer is; a connection that
// resumes it has another one and is reached by Post.
class ResumableStream final : public ResponseWriter,
                              public std::enable_shared_from_this<ResumableStream> {
 public:
  ResumableStream(std::shared_ptr<ResponseWriter> writer, std::string id, std::string scope,
                  const ResumableStreams::Options& options)
      : first_(std::move(writer)),
        id_(std::move(id)),
        scope_(std::move(scope)),
        options_(options),
        reader_(first_) {}

  const std::string& scope() const { return scope_; }
  bool IsExpired(TimePoint now) const;
  // The client has been away for too long: what makes the answer is told that it is gone.
  void Abandon();
  bool Attach(uint64_t next_event, const std::shared_ptr<ResponseWriter>& writer);

  void Send(http::Response response) override;
  void BeginStream(http::Response head) override;
  void Write(std::string_view data) override;
  void End() override;
  void SetKeepAlive(std::chrono::milliseconds interval, std::string text) override;
  void KeepWholeAlive(std::chrono::milliseconds interval, http::Response head) override;
  void OnDisconnect(std::function<void()> callback) override;
  void Post(std::function<void()> function) override { first_->Post(std::move(function)); }

 private:
  using Operation = std::function<void(ResponseWriter&)>;

  // On the reader's executor, if there is a reader. `lock` has been held since what is done was
  // written down, so that a connection that resumes meanwhile has it once.
  void ForReader(std::unique_lock<std::mutex> lock, Operation operation);
  void WatchReader(const std::shared_ptr<ResponseWriter>& writer);
  // The events of `data`, each with its id, added to the log; comments are left out of it.
  std::string AddToLog(std::string_view data);

  const std::shared_ptr<ResponseWriter> first_;
  const std::string id_;
  const std::string scope_;
  const ResumableStreams::Options options_;

  mutable std::mutex mutex_;                // guards the rest
  std::shared_ptr<ResponseWriter> reader_;  // null: the client has left
  std::optional<TimePoint> idle_since_;     // without a reader, or over
  bool over_ = false;
  std::optional<http::Response> head_;
  std::chrono::milliseconds keep_alive_interval_{0};
  std::string keep_alive_text_;
  std::function<void()> on_gone_;
  std::deque<std::string> log_;
  size_t log_bytes_ = 0;
  uint64_t first_event_ = 0;  // in the log
};

bool ResumableStream::IsExpired(TimePoint now) const {
  const std::lock_guard lock(mutex_);
  return idle_since_ && now > *idle_since_ + options_.window;
}

void ResumableStream::Abandon() {
  std::function<void()> on_gone;
  {
    const std::lock_guard lock(mutex_);
    on_gone = std::exchange(on_gone_, nullptr);
  }
  if (on_gone) first_->Post(std::move(on_gone));
}

void ResumableStream::ForReader(std::unique_lock<std::mutex> lock, Operation operation) {
  const std::shared_ptr<ResponseWriter> reader = reader_;
  lock.unlock();
  if (reader == first_) return operation(*reader);
  if (reader != nullptr) {
    reader->Post([reader, operation = std::move(operation)] { operation(*reader); });
  }
}

void ResumableStream::WatchReader(const std::shared_ptr<ResponseWriter>& writer) {
  // Weak: a writer must not own what owns it.
  writer->OnDisconnect([weak = weak_from_this(), reader = writer.get()] {
    const std::shared_ptr<ResumableStream> self = weak.lock();
    if (self == nullptr) return;
    {
      const std::lock_guard lock(self->mutex_);
      if (self->reader_.get() != reader) return;
      self->reader_ = nullptr;
      if (!self->idle_since_) self->idle_since_ = steady_clock::now();
      if (self->head_) return;
    }
    self->Abandon();  // not a stream: nothing to resume
  });
}

void ResumableStream::Send(http::Response response) {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
    idle_since_ = TimePoint::min();  // no stream: nothing to resume
    on_gone_ = nullptr;
  }
  first_->Send(std::move(response));
}

void ResumableStream::BeginStream(http::Response head) {
  std::unique_lock lock(mutex_);
  head_ = head;
  ForReader(std::move(lock),
            [head = std::move(head)](ResponseWriter& writer) { writer.BeginStream(head); });
}

std::string ResumableStream::AddToLog(std::string_view data) {
  std::string out;
  while (!data.empty()) {
    const size_t end = data.find("\n\n");
    const std::string_view frame = data.substr(0, end == data.npos ? data.size() : end + 2);
    data.remove_prefix(frame.size());
    if (frame.starts_with(':')) {
      out += frame;
      continue;
    }
    log_.push_back("id: " + id_ + "." + std::to_string(first_event_ + log_.size()) + "\n" +
                   std::string(frame));
    log_bytes_ += log_.back().size();
    out += log_.back();
  }
  while (log_bytes_ > options_.max_bytes) {
    log_bytes_ -= log_.front().size();
    log_.pop_front();
    ++first_event_;
  }
  return out;
}

void ResumableStream::Write(std::string_view data) {
  if (IsExpired(steady_clock::now())) return Abandon();
  std::unique_lock lock(mutex_);
  std::string text = AddToLog(data);
  ForReader(std::move(lock),
            [text = std::move(text)](ResponseWriter& writer) { writer.Write(text); });
}

void ResumableStream::End() {
  std::unique_lock lock(mutex_);
  over_ = true;
  on_gone_ = nullptr;
  if (!idle_since_) idle_since_ = steady_clock::now();
  ForReader(std::move(lock), [](ResponseWriter& writer) { writer.End(); });
}

void ResumableStream::SetKeepAlive(std::chrono::milliseconds interval, std::string text) {
  std::unique_lock lock(mutex_);
  keep_alive_interval_ = interval;
  keep_alive_text_ = text;
  ForReader(std::move(lock), [interval, text = std::move(text)](ResponseWriter& writer) {
    writer.SetKeepAlive(interval, text);
  });
}

void ResumableStream::KeepWholeAlive(std::chrono::milliseconds interval, http::Response head) {
  first_->KeepWholeAlive(interval, std::move(head));
}

void ResumableStream::OnDisconnect(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    on_gone_ = std::move(callback);
  }
  WatchReader(first_);
}

bool ResumableStream::Attach(uint64_t next_event, const std::shared_ptr<ResponseWriter>& writer) {
  std::string text;
  http::Response head;
  std::shared_ptr<ResponseWriter> before;
  std::chrono::milliseconds interval{0};
  std::string keep_alive;
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    const bool known =
        head_ && next_event >= first_event_ && next_event <= first_event_ + log_.size();
    if (!known) return false;
    for (size_t i = next_event - first_event_; i < log_.size(); ++i) text += log_[i];
    head = *head_;
    over = over_;
    interval = keep_alive_interval_;
    keep_alive = keep_alive_text_;
    before = std::exchange(reader_, writer);
    if (!over) idle_since_ = std::nullopt;
  }
  if (before != nullptr && !over) before->Post([before] { before->End(); });
  writer->BeginStream(std::move(head));
  writer->Write(text);
  if (over) {
    writer->End();
    return true;
  }
  writer->SetKeepAlive(interval, std::move(keep_alive));
  WatchReader(writer);
  return true;
}

std::shared_ptr<ResponseWriter> ResumableStreams::Begin(std::shared_ptr<ResponseWriter> writer,
                                                        std::string scope) {
  if (options_.window.count() == 0) return writer;
  const std::lock_guard lock(mutex_);
  DropExpired(steady_clock::now());
  if (streams_.size() >= options_.max_streams) return writer;
  const std::string id = NewId("");
  auto stream =
      std::make_shared<ResumableStream>(std::move(writer), id, std::move(scope), options_);
  streams_.emplace(id, stream);
  return stream;
}

bool ResumableStreams::Resume(std::string_view last_event_id, std::string_view scope,
                              const std::shared_ptr<ResponseWriter>& writer) {
  const size_t dot = last_event_id.rfind('.');
  if (dot == std::string_view::npos) return false;
  const std::string_view number = last_event_id.substr(dot + 1);
  uint64_t event = 0;
  const auto parsed = std::from_chars(number.data(), number.data() + number.size(), event);
  if (parsed.ec != std::errc() || parsed.ptr != number.data() + number.size()) return false;
  std::shared_ptr<ResumableStream> stream;
  {
    const std::lock_guard lock(mutex_);
    DropExpired(steady_clock::now());
    const auto it = streams_.find(std::string(last_event_id.substr(0, dot)));
    if (it == streams_.end() || it->second->scope() != scope) return false;
    stream = it->second;
  }
  return stream->Attach(event + 1, writer);
}

void ResumableStreams::DropExpired(TimePoint now) {
  std::erase_if(streams_, [now](const auto& entry) {
    if (!entry.second->IsExpired(now)) return false;
    entry.second->Abandon();
    return true;
  });
}

}  // namespace fathom::api
