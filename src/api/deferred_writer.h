// DeferredWriter: lets a handler run on another thread than the connection's. What the handler and
// its generation ask of the writer is kept until Release, then done on the connection's executor in
// the order it was asked; from then on everything passes through.
//
// Before Release: any thread, one after the other, but Post from any thread at any time. After it:
// as http::ResponseWriter.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "http/response_writer.h"

namespace fathom::api {

class DeferredWriter final : public http::ResponseWriter,
                             public std::enable_shared_from_this<DeferredWriter> {
 public:
  explicit DeferredWriter(std::shared_ptr<http::ResponseWriter> writer)
      : writer_(std::move(writer)) {}

  // Once, when the handler has returned.
  void Release();

  void Send(http::Response response) override;
  void BeginStream(http::Response head) override;
  void Write(std::string_view data) override;
  void End() override;
  void SetKeepAlive(std::chrono::milliseconds interval, std::string text) override;
  void KeepWholeAlive(std::chrono::milliseconds interval, http::Response head) override;
  void OnDisconnect(std::function<void()> callback) override;
  void Post(std::function<void()> function) override;

 private:
  // Does it now, or keeps it.
  void Do(std::function<void()> operation);
  void RunKept();

  const std::shared_ptr<http::ResponseWriter> writer_;
  std::mutex mutex_;
  bool released_ = false;                    // guarded
  std::vector<std::function<void()>> kept_;  // guarded
};

}  // namespace fathom::api
