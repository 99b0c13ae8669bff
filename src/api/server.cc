#include "api/server.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <string>
#include <utility>

#include "api/anthropic/handlers.h"
#include "api/anthropic/wire.h"
#include "api/auth.h"
#include "api/background.h"
#include "api/deferred_writer.h"
#include "api/http_metrics.h"
#include "api/openai/answer_format.h"
#include "api/openai/handlers.h"
#include "api/openapi.h"
#include "api/responses/handlers.h"
#include "api/resumable_stream.h"
#include "api/server_context.h"
#include "api/tagged_writer.h"
#include "api/thinking_mode.h"
#include "base/log.h"
#include "http/server.h"

namespace fathom::api {
namespace {

using openai::Writer;
using OpenAiHandler = void (*)(const ServerContext&, const http::Request&, const Writer&);
using AnthropicHandler = void (*)(const ServerContext&, const http::Request&,
                                  const std::string& request_id, const Writer&);

// After the engine has drained, the last bytes of the answers have this long.
constexpr std::chrono::seconds kFlushTime{5};

http::Response PlainResponse(int status, std::string body) {
  return {.status = status,
          .content_type = "text/plain; charset=utf-8",
          .headers = {},
          .body = std::move(body)};
}

using Handle = std::function<void(const http::Request&, const Writer&)>;

// A longer body is parsed and tokenized in the background: at some 20 MB a second, this is what an
// io thread's other clients may have to wait for.
constexpr size_t kInlineBodyBytes = 16 << 10;
constexpr int kBackgroundThreads = 2;
constexpr size_t kMaxWaitingLongRequests = 256;

const ApiError kOverloaded{.status = 429,
                           .message = "Too many long requests wait to be read: try again later.",
                           .param = "",
                           .code = "server_overloaded"};
const ApiError kNoStream{.status = 404,
                         .message =
                             "There is no stream with this Last-Event-ID: it is over, or "
                             "was left for too long. Send the request without the header.",
                         .param = "",
                         .code = "stream_not_found"};
const ApiError kDraining{.status = 503,
                         .message = "The server is shutting down.",
                         .param = "",
                         .code = "server_draining"};

// An error outside of the handlers, in the form that the path's clients read.
http::Response ErrorBody(const ApiError& error, const http::Request& request,
                         const std::string& request_id) {
  return anthropic::IsAnthropicPath(request.path) ? anthropic::ErrorResponse(error, request_id)
                                                  : openai::ErrorResponse(error);
}

// The same, with the id as a header.
http::Response ErrorResponse(const ApiError& error, const http::Request& request) {
  const http::Header tag = RequestIdHeader(request);
  http::Response response = ErrorBody(error, request, tag.value);
  response.headers.push_back(tag);
  return response;
}

// What anybody may ask: is it there, is it well.
bool IsProbe(const http::Request& request) {
  return request.path == "/" || request.path == "/ping" || request.path == "/health" ||
         request.path.starts_with("/health/");
}

class OpenAiServer final : public ApiServer {
 public:
  OpenAiServer(ApiOptions options, engine::Engine& engine, const text::Tokenizer& tokenizer,
               ModelInfo model, MetricsRegistry& metrics)
      : context_{.options = std::move(options),
                 .model = std::move(model),
                 .engine = engine,
                 .tokenizer = tokenizer,
                 .metrics = metrics,
                 .start_time = static_cast<int64_t>(std::time(nullptr))},
        keys_(context_.options.api_keys),
        streams_(context_.options.resumable_streams),
        http_(http::Server::Create(HttpOptions())) {
    RouteProbes();
    RouteMetrics();
    RouteOpenAi();
    RouteAnthropic();
  }
  ~OpenAiServer() override { Stop(std::chrono::milliseconds(0)); }

  Status Start();
  int port() const override { return http_->port(); }
  void Stop(std::chrono::milliseconds drain_timeout) override;

 private:
  http::ServerOptions HttpOptions();
  void RouteProbes();
  // On the API's port, or on one of its own.
  void RouteMetrics();
  void RouteOpenAi();
  void RouteAnthropic();
  void Route(const char* method, const char* path, OpenAiHandler handler);
  // A route that starts a generation: 503 while draining.
  void RouteGeneration(const char* path, OpenAiHandler handler);
  // What such a route does: goes on with a stream, or begins an answer.
  void Generate(http::Request request, const std::string& request_id, Writer writer, Handle handle);
  // Runs a handler where it holds up nobody.
  void Run(http::Request request, const std::string& request_id, Writer writer, Handle handle);
  std::optional<http::Response> Admit(const http::Request& request) const;

  ServerContext context_;
  const ApiKeys keys_;
  ResumableStreams streams_;
  bool stopped_ = false;
  const std::unique_ptr<http::Server> http_;
  std::unique_ptr<http::Server> metrics_http_;  // null: /metrics is on http_
  Background background_{kBackgroundThreads, kMaxWaitingLongRequests};
};

http::ServerOptions OpenAiServer::HttpOptions() {
  http::ServerOptions options;
  options.host = context_.options.host;
  options.port = context_.options.port;
  options.num_threads = context_.options.num_io_threads;
  options.limits = context_.options.http_limits;
  options.admit = [this](const http::Request& request) { return Admit(request); };
  options.error_response = [](int status, std::string_view message, const http::Request& request) {
    return ErrorResponse(
        {.status = status, .message = std::string(message), .param = "", .code = ""}, request);
  };
  options.on_exchange = [this](const http::ExchangeRecord& record) {
    RecordExchange(record, &context_.metrics);
    LogDebug("{} {} {} {:.1f} ms", record.method, record.route, record.status,
             record.seconds * 1000);
  };
  return options;
}

std::optional<http::Response> OpenAiServer::Admit(const http::Request& request) const {
  if (IsProbe(request) || keys_.Allow(request)) return std::nullopt;
  return ErrorResponse({.status = 401,
                        .message = "Incorrect or missing API key: send the header "
                                   "Authorization: Bearer KEY, or x-api-key: KEY.",
                        .param = "",
                        .code = "invalid_api_key"},
                       request);
}

void OpenAiServer::Route(const char* method, const char* path, OpenAiHandler handler) {
  http_->Route(method, path, [this, handler](http::Request request, Writer writer) {
    const http::Header tag = RequestIdHeader(request);
    Run(std::move(request), tag.value, TagWriter(std::move(writer), tag),
        [this, handler](const http::Request& r, const Writer& w) { handler(context_, r, w); });
  });
}

void OpenAiServer::Run(http::Request request, const std::string& request_id, Writer writer,
                       Handle handle) {
  if (request.body.size() <= kInlineBodyBytes) return handle(request, writer);
  auto deferred = std::make_shared<DeferredWriter>(writer);
  const auto shared = std::make_shared<http::Request>(std::move(request));
  const bool accepted = background_.TryRun([shared, deferred, handle = std::move(handle)] {
    // Released even if the handler throws: then the answer is a 500.
    const std::unique_ptr<DeferredWriter, void (*)(DeferredWriter*)> release(
        deferred.get(), [](DeferredWriter* held) { held->Release(); });
    handle(*shared, deferred);
  });
  if (!accepted) writer->Send(ErrorBody(kOverloaded, *shared, request_id));
}

void OpenAiServer::Generate(http::Request request, const std::string& request_id, Writer writer,
                            Handle handle) {
  const std::string* last_event_id = request.FindHeader("Last-Event-ID");
  const std::string* resumable = request.FindHeader("X-Resumable-Stream");
  if (last_event_id != nullptr && !last_event_id->empty()) {
    if (streams_.Resume(*last_event_id, CallerScope(request, ""), writer)) return;
    return writer->Send(ErrorBody(kNoStream, request, request_id));
  }
  if (context_.draining) return writer->Send(ErrorBody(kDraining, request, request_id));
  if (resumable != nullptr && http::EqualsIgnoringCase(*resumable, "true"))
    writer = streams_.Begin(std::move(writer), CallerScope(request, ""));
  Run(std::move(request), request_id, std::move(writer), std::move(handle));
}

void OpenAiServer::RouteGeneration(const char* path, OpenAiHandler handler) {
  http_->Route("POST", path, [this, handler](http::Request request, Writer writer) {
    const http::Header tag = RequestIdHeader(request);
    Generate(std::move(request), tag.value, TagWriter(std::move(writer), tag),
             [this, handler](const http::Request& r, const Writer& w) { handler(context_, r, w); });
  });
}

void OpenAiServer::RouteProbes() {
  const auto healthy = [this](bool ready_only) {
    const bool well = context_.engine.Stats().healthy && !(ready_only && context_.draining);
    return PlainResponse(well ? 200 : 503, well ? "" : "the engine does not run\n");
  };
  for (const char* path : {"/health", "/health/live", "/health/ready", "/ping"}) {
    const bool ready_only = std::string_view(path) == "/health/ready";
    const auto handler = [healthy, ready_only](http::Request, Writer writer) {
      writer->Send(healthy(ready_only));
    };
    http_->Route("GET", path, handler);
    if (std::string_view(path) == "/ping") http_->Route("POST", path, handler);
  }
  http_->Route("GET", "/", [](http::Request, Writer writer) {
    writer->Send(PlainResponse(200, "fathom " FATHOM_VERSION "\n"));
  });
  http_->Route("GET", "/version", [](http::Request, Writer writer) {
    writer->Send({.headers = {}, .body = R"({"version":")" FATHOM_VERSION "\"}"});
  });
  http_->Route("GET", "/openapi.json", [](http::Request, Writer writer) {
    std::string text(kOpenApiText);
    constexpr std::string_view kVersion = "@VERSION@";
    text.replace(text.find(kVersion), kVersion.size(), FATHOM_VERSION);
    writer->Send({.headers = {}, .body = std::move(text)});
  });
}

void OpenAiServer::RouteMetrics() {
  if (context_.options.metrics_port) {
    http::ServerOptions options;
    options.port = *context_.options.metrics_port;
    options.num_threads = 1;
    metrics_http_ = http::Server::Create(std::move(options));
  }
  http::Server& server = metrics_http_ ? *metrics_http_ : *http_;
  server.Route("GET", "/metrics", [this](http::Request, Writer writer) {
    writer->Send({.content_type = "text/plain; version=0.0.4; charset=utf-8",
                  .headers = {},
                  .body = context_.metrics.ExposeText()});
  });
}

void OpenAiServer::RouteOpenAi() {
  const OpenAiHandler models = [](const ServerContext& context, const http::Request& request,
                                  const Writer& writer) {
    const bool is_anthropic = request.FindHeader("anthropic-version") != nullptr;
    is_anthropic ? anthropic::HandleModels(context, writer)
                 : openai::HandleModels(context, request, writer);
  };
  for (const char* path : {"/v1/models", "/models"}) Route("GET", path, models);
  for (const char* path : {"/v1/models/*", "/models/*"}) Route("GET", path, openai::HandleModel);
  for (const char* path : {"/v1/chat/completions", "/chat/completions", "/beta/chat/completions"}) {
    RouteGeneration(path, openai::HandleChatCompletions);
  }
  for (const char* path : {"/v1/completions", "/completions", "/beta/completions"}) {
    RouteGeneration(path, openai::HandleCompletions);
  }
  RouteGeneration("/v1/responses", responses::HandleCreate);
  Route("GET", "/v1/responses/*", responses::HandleGet);
  Route("DELETE", "/v1/responses/*", responses::HandleDelete);
  Route("POST", "/reset_prefix_cache", openai::HandleResetPrefixCache);
  Route("POST", "/tokenize", openai::HandleTokenize);
  Route("POST", "/detokenize", openai::HandleDetokenize);
}

void OpenAiServer::RouteAnthropic() {
  const auto route = [this](const std::string& path, bool generates, AnthropicHandler handler) {
    http_->Route("POST", path, [this, generates, handler](http::Request request, Writer writer) {
      const http::Header tag = RequestIdHeader(request);
      writer = TagWriter(TagWriter(std::move(writer), tag), {"request-id", tag.value});
      Handle handle = [this, handler, id = tag.value](const http::Request& r, const Writer& w) {
        handler(context_, r, id, w);
      };
      generates ? Generate(std::move(request), tag.value, std::move(writer), std::move(handle))
                : Run(std::move(request), tag.value, std::move(writer), std::move(handle));
    });
  };
  for (const std::string base : {"/v1/messages", "/anthropic/v1/messages", "/anthropic/messages"}) {
    route(base, true, anthropic::HandleMessages);
    route(base + "/count_tokens", false, anthropic::HandleCountTokens);
  }
}

Status OpenAiServer::Start() {
  RETURN_IF_ERROR(http_->Start());
  LogInfo("listening on http://{}:{}", context_.options.host, port());
  if (metrics_http_) {
    RETURN_IF_ERROR(metrics_http_->Start());
    LogInfo("metrics at http://127.0.0.1:{}/metrics", metrics_http_->port());
  }
  return OkStatus();
}

void OpenAiServer::Stop(std::chrono::milliseconds drain_timeout) {
  if (std::exchange(stopped_, true)) return;
  context_.draining = true;
  context_.engine.Drain(drain_timeout);
  context_.grammars->Stop();  // its answers go through connections
  http_->Stop(kFlushTime);
  if (metrics_http_) metrics_http_->Stop(std::chrono::milliseconds(0));
}

}  // namespace

Result<std::unique_ptr<ApiServer>> StartApiServer(ApiOptions options, engine::Engine& engine,
                                                  const text::Tokenizer& tokenizer, ModelInfo model,
                                                  MetricsRegistry& metrics) {
  if (options.served_model_names.empty()) return InvalidArgument("a served model name is required");
  const MaybeError wrong =
      ValidateThinkingDefaults(options.default_chat_template_kwargs, options.effort_profile);
  if (wrong) return InvalidArgument("--default-chat-template-kwargs: " + wrong->message);
  auto server = std::make_unique<OpenAiServer>(std::move(options), engine, tokenizer,
                                               std::move(model), metrics);
  RETURN_IF_ERROR(server->Start());
  return std::unique_ptr<ApiServer>(std::move(server));
}

}  // namespace fathom::api
