#include "apps/fathom/serve.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "api/server.h"
#include "apps/fathom/commands.h"
#include "apps/fathom/local_engine.h"
#include "apps/fathom/memory_check.h"
#include "apps/fathom/sampling_defaults.h"
#include "base/clock.h"
#include "base/log.h"
#include "http/server.h"

namespace fathom::app {
namespace {

LogLevel ParseLogLevel(const std::string& name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

// A draft method that the checkpoint lacks is refused at start.
Status CheckSpeculativeMethod(const std::string& method, const config::ModelConfig& config) {
  if (method.empty()) return OkStatus();
  const config::DraftKind asked =
      method == "mtp" ? config::DraftKind::kMtp : config::DraftKind::kDSpark;
  if (config.draft == asked) return OkStatus();
  const char* has = config.draft == config::DraftKind::kMtp      ? "an MTP draft: use mtp"
                    : config.draft == config::DraftKind::kDSpark ? "a DSpark draft: use dspark"
                                                                 : "no draft";
  return InvalidArgument(fmt::format(
      "--speculative-config.method {} is not available: the checkpoint has {}", method, has));
}

// Maximum effort was made for contexts of 384K tokens or more.
void WarnAboutShortContext(const json::Value& kwargs, int64_t max_model_len) {
  constexpr int64_t kMaxEffortContext = 393216;
  const json::Value* effort = kwargs.Find("reasoning_effort");
  if (effort == nullptr || !effort->is_string() || effort->AsString() != "max") return;
  if (max_model_len >= kMaxEffortContext) return;
  LogWarning(
      "reasoning_effort max needs a context of {} tokens or more; this server has {}: answers may "
      "be cut",
      kMaxEffortContext, max_model_len);
}

api::ApiOptions MakeApiOptions(const ServeOptions& options, const ModelSession& session) {
  api::ApiOptions out;
  out.host = options.host;
  out.port = options.port;
  out.served_model_names = options.served_model_names;
  if (out.served_model_names.empty()) out.served_model_names = {options.model.model};
  out.api_keys = options.api_keys;
  out.default_chat_template_kwargs = options.default_chat_template_kwargs;
  out.effort_profile = ResolveEffortProfile(options.effort_profile, session.folder, session.config);
  out.raw_special_tokens = options.raw_special_tokens;
  if (options.model.seed != 0) out.seed = options.model.seed;
  out.limits = options.limits;
  out.replay_bytes = static_cast<size_t>(options.replay_bytes);
  out.response_store_bytes = static_cast<size_t>(options.response_store_bytes);
  out.resumable_streams.window = std::chrono::seconds(options.resume_window_s);
  out.keep_alive_interval = std::chrono::seconds(options.keep_alive_interval_s);
  out.http_limits = options.http_limits;
  out.allow_routed_experts = options.allow_routed_experts;
  out.allow_priority = options.allow_priority;
  out.allow_cache_reset = options.allow_cache_reset;
  out.isolate_keys = options.isolate_keys;
  out.num_io_threads = options.num_io_threads;
  out.metrics_port = options.metrics_port;
  return out;
}

// While it lives a signal ends the process at once: nothing is served yet that could be drained,
// and weights take minutes to load, as other nodes do to come.
class EndedBySignal {
 public:
  explicit EndedBySignal(const sigset_t& signals) : thread_([this, signals] { Watch(signals); }) {}
  ~EndedBySignal() {
    is_over_ = true;
    thread_.join();
  }

 private:
  void Watch(const sigset_t& signals) {
    constexpr timespec kInterval{.tv_sec = 0, .tv_nsec = 20'000'000};
    while (!is_over_) {
      const int signal = sigtimedwait(&signals, nullptr, &kInterval);
      if (signal > 0) std::_Exit(128 + signal);
    }
  }

  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

// Until a signal comes, or the engine has failed: that is the error.
Status WaitForSignal(const sigset_t& signals, const engine::Engine& engine) {
  constexpr timespec kInterval{.tv_sec = 0, .tv_nsec = 100'000'000};
  while (true) {
    if (sigtimedwait(&signals, nullptr, &kInterval) > 0) return OkStatus();
    const engine::EngineStats stats = engine.Stats();
    if (!stats.healthy) return stats.error;
  }
}

// Runs node 0's steps until that ends. Launchers signal all nodes at once, and node 0 needs the
// others to drain: after a signal this node leaves when node 0 has had its time for it. A second
// signal ends the process at once.
Status FollowUntilSignal(const ModelSession& session, const ServeOptions& options,
                         const sigset_t& signals) {
  constexpr timespec kInterval{.tv_sec = 0, .tv_nsec = 100'000'000};
  LogInfo("node {} follows node 0, which serves", session.nodes->node_rank());
  auto followed =
      std::async(std::launch::async, [&] { return LocalEngine::Follow(session, options.model); });
  std::optional<TimePoint> leave_at;
  while (followed.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    const int signal = sigtimedwait(&signals, nullptr, &kInterval);
    const TimePoint now = SystemClock().Now();
    if (signal > 0 && leave_at) std::_Exit(128 + signal);
    if (signal > 0) {
      LogInfo("stopping with node 0, or alone after {:.0f} s; signal again to stop now",
              options.drain_timeout_s);
      leave_at =
          now + std::chrono::milliseconds(static_cast<int64_t>(options.drain_timeout_s * 1000));
    }
    if (leave_at && now >= *leave_at) session.nodes->control().Close();
  }
  return followed.get();
}

// What failed cannot be recovered. The requests have their errors; probes may see it for a moment.
// Who takes it apart may wait for a GPU for ever: then the process ends all the same.
void StopAfterFailure(api::ApiServer& server, const Status& failure) {
  constexpr auto kProbeTime = std::chrono::seconds(2), kPatience = std::chrono::seconds(2);
  std::this_thread::sleep_for(kProbeTime);
  server.Stop(std::chrono::milliseconds(0));
  std::thread([failure, kPatience] {
    std::this_thread::sleep_for(kPatience);
    fmt::print(stderr, "fathom: {}\n", failure.message());
    std::_Exit(ExitCode(failure));
  }).detach();
}

// Drains; a second signal ends the process at once.
void StopGracefully(api::ApiServer& server, const sigset_t& signals, double drain_timeout_s) {
  LogInfo("stopping: running requests may finish for {:.0f} s; signal again to stop now",
          drain_timeout_s);
  std::thread([signals] {
    int second = 0;
    sigwait(&signals, &second);
    std::_Exit(128 + second);
  }).detach();
  server.Stop(std::chrono::milliseconds(static_cast<int64_t>(drain_timeout_s * 1000)));
}

}  // namespace

sigset_t BlockStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

std::string ModelName(const ServeOptions& options) {
  return options.served_model_names.empty() ? options.model.model
                                            : options.served_model_names.front();
}

Status ServeUntilSignal(const ServeOptions& options, const ModelSession& session,
                        engine::Engine& engine, MetricsRegistry& metrics, const sigset_t& signals) {
  RETURN_IF_ERROR(CheckSpeculativeMethod(options.speculative_method, session.config));
  WarnAboutShortContext(options.default_chat_template_kwargs, engine.max_model_len());
  api::ApiOptions api_options = MakeApiOptions(options, session);
  ASSIGN_OR_RETURN(api_options.default_sampling,
                   SamplingDefaults(options.use_generation_config ? session.folder : "",
                                    options.override_generation_config));
  if (options.api_keys.empty() && options.host != "127.0.0.1" && options.host != "localhost" &&
      options.host != "::1") {
    LogWarning("listening on {} without --api-key: anyone who reaches it can use it", options.host);
  }
  const api::ModelInfo info{.root = options.model.model,
                            .special_tokens = session.special_tokens,
                            .num_layers = session.config.num_layers,
                            .num_experts = session.config.num_experts,
                            .num_experts_per_token = session.config.num_experts_per_token};
  ASSIGN_OR_RETURN(const auto server, api::StartApiServer(std::move(api_options), engine,
                                                          *session.tokenizer, info, metrics));
  LogInfo("serving {} at http://{}:{}/v1, context {} tokens", ModelName(options), options.host,
          server->port(), engine.max_model_len());
  Status failure = WaitForSignal(signals, engine);
  if (!failure.ok()) {
    StopAfterFailure(*server, failure);
    return failure;
  }
  StopGracefully(*server, signals, options.drain_timeout_s);
  return OkStatus();
}

Status RunServe(const ServeOptions& options) {
  SetLogLevel(ParseLogLevel(options.log_level));
  const sigset_t signals = BlockStopSignals();
  std::optional<EndedBySignal> start(signals);
  const auto check = [&options](const ModelSession& session) {
    RETURN_IF_ERROR(CheckKvRoom(options.model, session));
    return session.is_follower() ? OkStatus() : http::CheckAddress(options.host, options.port);
  };
  ASSIGN_OR_RETURN(ModelSession session, OpenModel(options.model, SessionText::kTokenizer, check));
  if (session.is_follower()) {
    start.reset();
    return FollowUntilSignal(session, options, signals);
  }
  ASSIGN_OR_RETURN(const auto local, LocalEngine::Start(std::move(session), options.model,
                                                        ModelName(options), options.max_queue));
  start.reset();
  return ServeUntilSignal(options, local->session(), local->engine(), local->metrics(), signals);
}

}  // namespace fathom::app
