#include "http/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "http/raw_client.h"
#include "http/sse.h"

namespace fathom::http {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

using Writer = std::shared_ptr<ResponseWriter>;

std::string Get(const std::string& path) { return "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n"; }
std::string Post(const std::string& path, const std::string& body) {
  return "POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\n\r\n" + body;
}

// A server with an echo, a writer that the test keeps, and a stream.
class ServerTest : public testing::Test {
 protected:
  ServerTest() {
    options_.error_response = [](int status, std::string_view message, const Request&) {
      return Response{
          .status = status, .headers = {}, .body = "{\"error\":\"" + std::string(message) + "\"}"};
    };
    options_.on_exchange = [this](const ExchangeRecord& record) {
      const std::lock_guard lock(mutex_);
      exchanges_.push_back(std::string(record.method) + " " + std::string(record.route) + " " +
                           std::to_string(record.status));
    };
  }
  ~ServerTest() override { held_.reset(); }

  void Start() {
    server_ = Server::Create(options_);
    server_->Route("POST", "/echo", [](Request request, Writer writer) {
      writer->Send({.headers = {}, .body = request.body});
    });
    server_->Route("GET", "/echo", [](Request request, Writer writer) {
      writer->Send({.headers = {}, .body = request.query});
    });
    server_->Route("POST", "/hold", [this](Request, Writer writer) {
      writer->OnDisconnect([this] { disconnected_.set_value(); });
      const std::lock_guard lock(mutex_);
      held_ = std::move(writer);
      held_event_.notify_all();
    });
    server_->Route("GET", "/drop", [](Request, Writer) {});
    server_->Route("GET", "/throw", [](Request, Writer) { throw std::runtime_error("no"); });
    ASSERT_TRUE(server_->Start().ok());
  }
  Writer WaitHeld() {
    std::unique_lock lock(mutex_);
    held_event_.wait_for(lock, 60s, [this] { return held_ != nullptr; });
    return std::move(held_);
  }
  bool WaitDisconnected() {
    return disconnected_.get_future().wait_for(60s) == std::future_status::ready;
  }
  bool WaitExchange(const std::string& exchange) {
    for (int i = 0; i < 6000; ++i) {
      {
        const std::lock_guard lock(mutex_);
        if (std::count(exchanges_.begin(), exchanges_.end(), exchange) > 0) return true;
      }
      std::this_thread::sleep_for(10ms);
    }
    return false;
  }

  ServerOptions options_;
  std::mutex mutex_;
  std::condition_variable held_event_;
  Writer held_;
  std::vector<std::string> exchanges_;
  std::promise<void> disconnected_;
  std::unique_ptr<Server> server_;
};

TEST_F(ServerTest, KeepsAConnectionForManyRequests) {
  Start();
  RawClient client(server_->port());
  for (const std::string body : {"one", "", "three"}) {
    client.Send(Post("/echo", body));
    const std::string head = client.ReadUntil("\r\n\r\n");
    EXPECT_THAT(head, AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("Date: "),
                            HasSubstr("Content-Type: application/json\r\n"),
                            HasSubstr("Content-Length: " + std::to_string(body.size()) + "\r\n"),
                            Not(HasSubstr("Connection:"))));
    if (!body.empty()) {
      EXPECT_EQ(client.ReadUntil(body), body);
    }
  }
  EXPECT_TRUE(WaitExchange("POST /echo 200"));
}

TEST_F(ServerTest, ServesPipelinedRequestsInOrder) {
  options_.limits.max_pipelined_bytes = 1000;
  Start();
  RawClient client(server_->port());
  std::string requests;
  for (int i = 0; i < 2000; ++i) requests += Get("/echo?n" + std::to_string(i) + ".");
  std::thread sender([&] { client.Send(requests); });
  for (int i = 0; i < 2000; ++i) {
    const std::string mark = "n" + std::to_string(i) + ".";
    ASSERT_THAT(client.ReadUntil(mark), EndsWith("\r\n\r\n" + mark));
  }
  sender.join();
}

TEST_F(ServerTest, AnswersHeadWithoutABody) {
  Start();
  RawClient client(server_->port());
  client.Send("HEAD /echo?abc HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(client.ReadToClose(),
              AllOf(HasSubstr("Content-Length: 3\r\n"), HasSubstr("Connection: close\r\n"),
                    EndsWith("\r\n\r\n")));
}

TEST_F(ServerTest, NamesWhatIsWrongWithARoute) {
  Start();
  RawClient client(server_->port());
  client.Send(Get("/nowhere"));
  EXPECT_THAT(client.ReadUntil("}"),
              AllOf(StartsWith("HTTP/1.1 404 "),
                    EndsWith("{\"error\":\"there is no route GET /nowhere\"}")));
  client.Send(Get("/hold"));
  EXPECT_THAT(client.ReadUntil("}"),
              AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("\r\nAllow: OPTIONS, POST\r\n")));
  client.Send("OPTIONS /hold HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 204 "), HasSubstr("Allow: OPTIONS, POST\r\n"),
                    Not(HasSubstr("Content-Length"))));
}

TEST_F(ServerTest, AnswersMalformedRequestsAndCloses) {
  Start();
  RawClient client(server_->port());
  client.Send("GET / HTTP/1.1\r\n\r\n");
  EXPECT_THAT(client.ReadToClose(),
              AllOf(StartsWith("HTTP/1.1 400 "), HasSubstr("Connection: close"),
                    EndsWith("{\"error\":\"exactly one Host header is expected\"}")));
}

TEST_F(ServerTest, RefusesALargeBodyBeforeItIsSent) {
  options_.limits.max_body_bytes = 1000;
  Start();
  RawClient client(server_->port());
  client.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n");
  EXPECT_THAT(client.ReadToClose(), StartsWith("HTTP/1.1 413 "));
}

TEST_F(ServerTest, LetsTheClientReadTheRefusalOfABodyItIsStillSending) {
  options_.limits.max_body_bytes = 1000;
  Start();
  RawClient client(server_->port());
  client.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n");
  EXPECT_TRUE(client.Send(std::string(4'000'000, 'a')));
  EXPECT_THAT(client.ReadUntil("}"), StartsWith("HTTP/1.1 413 "));
}

TEST_F(ServerTest, AsksForTheBodyOfARequestThatExpectsIt) {
  Start();
  RawClient client(server_->port());
  client.Send(
      "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.Send("abc");
  EXPECT_THAT(client.ReadUntil("abc"), StartsWith("HTTP/1.1 200 OK"));
}

TEST_F(ServerTest, AdmitsBeforeTheBodyIsRead) {
  options_.admit = [](const Request& request) -> std::optional<Response> {
    if (request.FindHeader("Authorization") != nullptr) return std::nullopt;
    return Response{.status = 401, .headers = {}, .body = "{}"};
  };
  Start();
  RawClient client(server_->port());
  client.Send(
      "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_THAT(client.ReadToClose(),
              AllOf(StartsWith("HTTP/1.1 401 "), Not(HasSubstr("100 Continue"))));
  EXPECT_TRUE(WaitExchange("POST /echo 401"));
}

TEST_F(ServerTest, RefusesCompressedBodies) {
  Start();
  RawClient client(server_->port());
  client.Send(
      "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc");
  EXPECT_THAT(client.ReadToClose(), StartsWith("HTTP/1.1 415 "));
}

TEST_F(ServerTest, EndsRequestsThatComeTooSlowly) {
  options_.limits.header_timeout = 100ms;
  options_.limits.body_grace = 100ms;
  options_.limits.min_body_bytes_per_second = 100'000;
  options_.limits.idle_timeout = 2s;  // also for what a client says first
  Start();
  RawClient header(server_->port());
  header.Send("GET / HTTP/1.1\r\n");
  EXPECT_THAT(header.ReadToClose(), StartsWith("HTTP/1.1 408 "));
  RawClient body(server_->port());
  body.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\na");
  EXPECT_THAT(body.ReadToClose(), StartsWith("HTTP/1.1 408 "));
  RawClient idle(server_->port());
  idle.Send(Get("/echo?abc"));
  EXPECT_THAT(idle.ReadUntil("abc"), StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(idle.ReadToClose(), "");
  EXPECT_TRUE(idle.closed());
}

TEST_F(ServerTest, StreamsChunksAsTheyAreWritten) {
  Start();
  RawClient client(server_->port());
  client.Send(Post("/hold", "{}"));
  const Writer writer = WaitHeld();
  writer->Post([writer] {
    writer->BeginStream({.content_type = "text/event-stream",
                         .headers = {{"Cache-Control", "no-cache"}},
                         .body = ""});
  });
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"),
              AllOf(HasSubstr("Content-Type: text/event-stream\r\n"),
                    HasSubstr("Transfer-Encoding: chunked\r\n"),
                    HasSubstr("Cache-Control: no-cache\r\n"), Not(HasSubstr("Content-Length"))));
  writer->Post([writer] { writer->Write(SseData("hello world")); });
  EXPECT_EQ(client.ReadUntil("\n\n\r\n"), "13\r\ndata: hello world\n\n\r\n");
  writer->Post([writer] { writer->End(); });
  EXPECT_EQ(client.ReadUntil("0\r\n\r\n"), "0\r\n\r\n");
  client.Send(Get("/echo?again"));
  EXPECT_THAT(client.ReadUntil("again"), StartsWith("HTTP/1.1 200 OK"));
}

TEST_F(ServerTest, EndsAnHttp10StreamByClosing) {
  Start();
  RawClient client(server_->port());
  client.Send("POST /hold HTTP/1.0\r\nContent-Length: 0\r\n\r\n");
  const Writer writer = WaitHeld();
  writer->Post([writer] {
    writer->BeginStream({.headers = {}, .body = ""});
    writer->Write("abc");
    writer->End();
  });
  EXPECT_THAT(client.ReadToClose(), AllOf(EndsWith("\r\n\r\nabc"), Not(HasSubstr("chunked"))));
}

TEST_F(ServerTest, KeepsASilentStreamAlive) {
  Start();
  RawClient client(server_->port());
  client.Send(Post("/hold", ""));
  const Writer writer = WaitHeld();
  writer->Post([writer] {
    writer->BeginStream({.headers = {}, .body = ""});
    writer->SetKeepAlive(50ms, SseComment("keep-alive"));
  });
  for (int i = 0; i < 3; ++i)
    EXPECT_THAT(client.ReadUntil(": keep-alive\n\n"), EndsWith(": keep-alive\n\n"));
  writer->Post([writer] { writer->End(); });
  client.ReadUntil("0\r\n\r\n");
  EXPECT_EQ(client.ReadUntil("x", 150ms), "");
}

TEST_F(ServerTest, TellsOfADisconnectWhileNothingIsWritten) {
  Start();
  RawClient client(server_->port());
  client.Send(Post("/hold", ""));
  const Writer writer = WaitHeld();
  client.Close();
  EXPECT_TRUE(WaitDisconnected());
  EXPECT_TRUE(WaitExchange("POST /hold 499"));
  writer->Post([writer] { writer->Send({.headers = {}, .body = "too late"}); });
}

TEST_F(ServerTest, TellsOfADisconnectBehindPipelinedBytes) {
  Start();
  RawClient client(server_->port());
  client.Send(Post("/hold", ""));
  const Writer writer = WaitHeld();
  client.Send(Get("/echo"));
  client.Close();
  EXPECT_TRUE(WaitDisconnected());
}

TEST_F(ServerTest, CutsAStreamThatIsReadTooSlowly) {
  options_.limits.max_write_buffer_bytes = 100'000;
  Start();
  RawClient client;
  client.SetReceiveBuffer(4096);
  ASSERT_TRUE(client.Connect(server_->port()));
  client.Send(Post("/hold", ""));
  const Writer writer = WaitHeld();
  writer->Post([writer] { writer->BeginStream({.headers = {}, .body = ""}); });
  auto gone = disconnected_.get_future();
  int writes = 0;
  while (gone.wait_for(0s) != std::future_status::ready && ++writes < 10'000) {
    std::promise<void> written;
    writer->Post([&] {
      writer->Write(std::string(10'000, 'a'));
      written.set_value();
    });
    written.get_future().wait();
  }
  EXPECT_LT(writes, 10'000) << "100 MB were buffered";
}

TEST_F(ServerTest, CutsAReaderThatTakesNothing) {
  options_.limits.write_stall_timeout = 200ms;
  Start();
  RawClient client;
  client.SetReceiveBuffer(4096);
  ASSERT_TRUE(client.Connect(server_->port()));
  client.Send(Post("/hold", ""));
  const Writer writer = WaitHeld();
  writer->Post([writer] {
    writer->BeginStream({.headers = {}, .body = ""});
    writer->Write(std::string(50'000'000, 'a'));
  });
  EXPECT_TRUE(WaitDisconnected());
}

TEST_F(ServerTest, AnswersForAHandlerThatDoesNot) {
  Start();
  RawClient client(server_->port());
  for (const std::string path : {"/drop", "/throw"}) {
    client.Send(Get(path));
    EXPECT_THAT(client.ReadUntil("}"), StartsWith("HTTP/1.1 500 ")) << path;
  }
}

TEST_F(ServerTest, SaysWhatToDoWhenThePortIsTaken) {
  Start();
  ServerOptions options;
  options.port = server_->port();
  const Status status = Server::Create(options)->Start();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "cannot listen on 127.0.0.1:" + std::to_string(server_->port()) +
                                  ": the port is already in use: stop the other server or choose "
                                  "another --port");
  options.port = 0;
  options.host = "192.0.2.1";
  EXPECT_THAT(Server::Create(options)->Start().message(), HasSubstr("does not have that address"));
  options.host = "no such host";
  EXPECT_THAT(Server::Create(options)->Start().message(), HasSubstr("--host"));
  options.port = 70000;
  EXPECT_THAT(Server::Create(options)->Start().message(), HasSubstr("0 to 65535"));
}

TEST_F(ServerTest, LetsRunningAnswersEndWhenItStops) {
  Start();
  RawClient idle(server_->port());
  idle.Send(Get("/echo?abc"));
  idle.ReadUntil("abc");
  RawClient client(server_->port());
  client.Send(Post("/hold", ""));
  Writer writer = WaitHeld();
  std::thread stopper([this] { server_->Stop(10s); });
  EXPECT_EQ(idle.ReadToClose(), "");
  writer->Post([writer] { writer->Send({.headers = {}, .body = "last"}); });
  writer.reset();
  EXPECT_THAT(client.ReadToClose(), EndsWith("last"));
  client.Close();
  stopper.join();
  EXPECT_FALSE(RawClient().Connect(server_->port()));
}

TEST_F(ServerTest, CutsAnswersThatOutlastTheGrace) {
  Start();
  RawClient client(server_->port());
  client.Send(Post("/hold", ""));
  const Writer writer = WaitHeld();
  server_->Stop(50ms);
  EXPECT_TRUE(WaitDisconnected());
  EXPECT_EQ(client.ReadToClose(), "");
}

TEST_F(ServerTest, WaitsOutAShortageOfDescriptors) {
  Start();
  RawClient client;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next_fd = dup(0);
  close(next_fd);
  const rlimit none{static_cast<rlim_t>(next_fd), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  client.Connect(server_->port());
  client.Send(Get("/echo?abc"));
  const std::string starved = client.ReadUntil("abc", 100ms);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(starved, "");
  EXPECT_THAT(client.ReadUntil("abc"), EndsWith("abc"));
}

TEST_F(ServerTest, HoldsManyConnections) {
  Start();
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 200; ++i) {
    clients.push_back(std::make_unique<RawClient>(server_->port()));
    clients.back()->Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n");
  }
  for (const auto& client : clients) client->Send("hello");
  for (const auto& client : clients)
    EXPECT_THAT(client->ReadUntil("hello"), EndsWith("\r\n\r\nhello"));
}

}  // namespace
}  // namespace fathom::http
