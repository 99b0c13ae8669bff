#include "api/tagged_writer.h"

#include <utility>

#include "api/identifiers.h"

namespace fathom::api {
namespace {

class TaggedWriter final : public http::ResponseWriter {
 public:
  TaggedWriter(std::shared_ptr<http::ResponseWriter> writer, http::Header tag)
      : writer_(std::move(writer)), tag_(std::move(tag)) {}

  void Send(http::Response response) override {
    response.headers.push_back(tag_);
    writer_->Send(std::move(response));
  }
  void BeginStream(http::Response head) override {
    head.headers.push_back(tag_);
    writer_->BeginStream(std::move(head));
  }
  void Write(std::string_view data) override { writer_->Write(data); }
  void End() override { writer_->End(); }
  void SetKeepAlive(std::chrono::milliseconds interval, std::string text) override {
    writer_->SetKeepAlive(interval, std::move(text));
  }
  void KeepWholeAlive(std::chrono::milliseconds interval, http::Response head) override {
    head.headers.push_back(tag_);
    writer_->KeepWholeAlive(interval, std::move(head));
  }
  void OnDisconnect(std::function<void()> callback) override {
    writer_->OnDisconnect(std::move(callback));
  }
  void Post(std::function<void()> function) override { writer_->Post(std::move(function)); }

 private:
  const std::shared_ptr<http::ResponseWriter> writer_;
  const http::Header tag_;
};

}  // namespace

http::Header RequestIdHeader(const http::Request& request) {
  const std::string* given = request.FindHeader("x-request-id");
  std::string id = given == nullptr ? "" : SanitizeClientId(*given);
  return {"x-request-id", id.empty() ? NewId("req_") : std::move(id)};
}

std::shared_ptr<http::ResponseWriter> TagWriter(std::shared_ptr<http::ResponseWriter> writer,
                                                http::Header tag) {
  return std::make_shared<TaggedWriter>(std::move(writer), std::move(tag));
}

}  // namespace fathom::api
