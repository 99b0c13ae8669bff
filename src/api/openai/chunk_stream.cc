#include "api/openai/chunk_stream.h"

#include <utility>

#include "http/sse.h"

namespace fathom::api::openai {

ChunkStream::ChunkStream(std::shared_ptr<http::ResponseWriter> writer, const Envelope& envelope,
                         const GenerationParams& params)
    : writer_(std::move(writer)),
      open_object_(envelope.OpenObject()),
      include_usage_(params.include_usage),
      continuous_usage_(params.continuous_usage) {}

void ChunkStream::Begin(std::chrono::milliseconds keep_alive_interval) {
  writer_->BeginStream({.content_type = "text/event-stream; charset=utf-8",
                        .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}},
                        .body = ""});
  writer_->SetKeepAlive(keep_alive_interval, http::SseComment("keep-alive"));
}

void ChunkStream::Add(const json::Value& choice, const UsageTally& usage) {
  std::string chunk = open_object_ + ",\"choices\":[" + json::Dump(choice) + "]";
  if (continuous_usage_) {
    chunk += ",\"usage\":" + json::Dump(usage.ToJson());
  } else if (include_usage_) {
    chunk += ",\"usage\":null";
  }
  pending_ += http::SseData(chunk + "}");
}

void ChunkStream::AddProgress(size_t prompt_idx, int num_processed_tokens, int num_cached_tokens,
                              int64_t num_prompt_tokens) {
  progress_[prompt_idx] = {num_processed_tokens, num_cached_tokens};
  int64_t processed = 0;
  int64_t cached = 0;
  for (const auto& [idx, progress] : progress_) {
    processed += progress.processed;
    cached += progress.cached;
  }
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                      std::chrono::steady_clock::now() - begin_)
                      .count();
  const json::Value progress = json::Value::Object({{"total", Integer(num_prompt_tokens)},
                                                    {"cache", Integer(cached)},
                                                    {"processed", Integer(processed)},
                                                    {"time_ms", Integer(ms)}});
  AddMember("prompt_progress", progress);
}

void ChunkStream::AddMember(std::string_view name, const json::Value& value) {
  pending_ += http::SseData(open_object_ + ",\"choices\":[]," + json::Quote(name) + ":" +
                            json::Dump(value) + "}");
}

void ChunkStream::Send() {
  if (!pending_.empty()) writer_->Write(std::exchange(pending_, ""));
}

void ChunkStream::Finish(const UsageTally& usage) {
  if (include_usage_) {
    pending_ += http::SseData(open_object_ +
                              ",\"choices\":[],\"usage\":" + json::Dump(usage.ToJson()) + "}");
  }
  pending_ += http::SseData("[DONE]");
  Send();
  writer_->End();
}

void ChunkStream::Fail(const ApiError& error) {
  pending_ += http::SseData(json::Dump(ErrorBody(error)));
  pending_ += http::SseData("[DONE]");
  Send();
  writer_->End();
}

}  // namespace fathom::api::openai
