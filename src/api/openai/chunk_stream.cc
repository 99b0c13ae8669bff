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
