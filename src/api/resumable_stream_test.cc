#include "api/resumable_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fathom::api {
namespace {

// Keeps what was written; posted functions run when the test says so.
class Connection final : public http::ResponseWriter {
 public:
  void Send(http::Response) override { ADD_FAILURE() << "a whole answer"; }
  void BeginStream(http::Response) override { EXPECT_FALSE(std::exchange(has_begun_, true)); }
  void Write(std::string_view data) override { text_ += data; }
  void End() override { has_ended_ = true; }
  void SetKeepAlive(std::chrono::milliseconds, std::string) override {}
  void KeepWholeAlive(std::chrono::milliseconds, http::Response) override {}
  void OnDisconnect(std::function<void()>) override {}
  void Post(std::function<void()> function) override {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(function));
  }

  void RunPosted() {
    std::vector<std::function<void()>> posted;
    {
      const std::lock_guard lock(mutex_);
      posted.swap(posted_);
    }
    for (const auto& function : posted) function();
  }
  bool has_ended() const { return has_ended_; }
  const std::string& text() const { return text_; }

 private:
  bool has_begun_ = false;
  bool has_ended_ = false;
  std::string text_;
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;  // guarded
};

// As many times as a client can, while another thread makes the answer.
TEST(ResumableStream, WhoResumesWhileItIsWrittenHasEveryEventOnceAndTheEnd) {
  constexpr int kEvents = 20;
  const auto data = [](int event) { return "data: " + std::to_string(event) + "\n\n"; };
  for (int round = 0; round < 300 && !testing::Test::HasFailure(); ++round) {
    ResumableStreams streams({});
    const auto first = std::make_shared<Connection>();
    const auto stream = streams.Begin(first, "key");
    stream->BeginStream({});
    stream->Write(data(0));
    const std::string id = first->text().substr(4, first->text().find('.') - 4);
    std::atomic<bool> is_made = false;
    std::thread answer([&] {
      for (int event = 1; event < kEvents; ++event) stream->Write(data(event));
      stream->End();
      is_made = true;
    });
    int next = 1;
    std::vector<std::shared_ptr<Connection>> connections = {first};
    std::shared_ptr<Connection> connection;
    do {
      connection = connections.emplace_back(std::make_shared<Connection>());
      const std::string last = id + "." + std::to_string(next - 1);
      ASSERT_TRUE(streams.Resume(last, "key", connection));
      const bool was_made = is_made;
      connection->RunPosted();
      std::string expected;
      while (expected.size() < connection->text().size()) {
        expected += "id: " + id + "." + std::to_string(next) + "\n" + data(next);
        ++next;
      }
      EXPECT_EQ(connection->text(), expected);
      EXPECT_TRUE(connection->has_ended() || !was_made);
    } while (!connection->has_ended() && !testing::Test::HasFailure());
    answer.join();
    EXPECT_EQ(next, kEvents);
    for (const auto& each : connections) each->RunPosted();  // what is posted holds it
  }
}

}  // namespace
}  // namespace fathom::api
