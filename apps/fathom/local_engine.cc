#include "apps/fathom/local_engine.h"

#include <condition_variable>
#include <deque>
#include <mutex>

#include "apps/fathom/model_fingerprint.h"
#include "engine/follower.h"
#include "engine/make_engine.h"
#include "kv_cache/kv_layout.h"

namespace fathom::app {
namespace {

// Events wait here for the main thread. Bounded by the request's own max_tokens.
class WaitingSink final : public request::TokenSink {
 public:
  void OnEvent(request::TokenEvent event) override {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    arrived_.notify_one();
  }
  request::TokenEvent Wait() {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [this] { return !events_.empty(); });
    request::TokenEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<request::TokenEvent> events_;  // guarded by mutex_
};

engine::EngineOptions EngineOptionsOf(const ModelSession& s, const ModelOptions& options) {
  engine::EngineOptions engine_options = engine::OptionsFor(s.config, s.limits);
  engine_options.kv_cache_bytes = options.kv_cache_bytes;
  if (s.on_gpu()) {
    engine_options.kv_memory_share = options.gpu_memory_utilization;
    engine_options.auto_model_len = options.max_model_len == 0;
  }
  engine_options.kv = options.kv;
  engine_options.kv.turn_token_id = s.special_tokens.user;
  engine_options.kv.model_fingerprint = ModelFingerprint(options, s);
  engine_options.decode_floor = options.decode_floor;
  engine_options.async_scheduling = options.async_scheduling;
  engine_options.parallel = options.parallel;
  return engine_options;
}

std::vector<engine::EngineRank> EngineRanksOf(const ModelSession& s) {
  std::vector<engine::EngineRank> ranks;
  for (const SessionRank& rank : s.ranks) {
    ranks.push_back({.model = rank.model.get(),
                     .device = rank.device.get(),
                     .layout = kv_cache::MakeKvLayout(rank.config, s.numerics, s.index_dtype),
                     .place = rank.place,
                     .transport = rank.transport});
  }
  return ranks;
}

}  // namespace

Result<std::unique_ptr<LocalEngine>> LocalEngine::Start(const ModelOptions& options,
                                                        const std::string& model_name,
                                                        int max_queue) {
  ASSIGN_OR_RETURN(ModelSession session, OpenModel(options, SessionText::kTokenizer));
  return Start(std::move(session), options, model_name, max_queue);
}

Result<std::unique_ptr<LocalEngine>> LocalEngine::Start(ModelSession session,
                                                        const ModelOptions& options,
                                                        const std::string& model_name,
                                                        int max_queue) {
  if (session.is_follower()) {
    return InvalidArgument("only fathom serve runs on a node other than 0: start it there");
  }
  auto local = std::unique_ptr<LocalEngine>(new LocalEngine(std::move(session)));
  const ModelSession& s = local->session_;
  engine::EngineOptions engine_options = EngineOptionsOf(s, options);
  engine_options.model_name = model_name;
  engine_options.max_queue = max_queue;
  ASSIGN_OR_RETURN(local->engine_,
                   engine::MakeEngine(engine_options, EngineRanksOf(s), local->metrics_,
                                      local->clock_, s.nodes.get()));
  return local;
}

Status LocalEngine::Follow(const ModelSession& session, const ModelOptions& options) {
  return engine::RunFollower(EngineOptionsOf(session, options), EngineRanksOf(session),
                             *session.nodes);
}

Result<request::FinishReason> LocalEngine::Generate(std::vector<int32_t> prompt,
                                                    const request::SamplingParams& sampling,
                                                    const OnToken& on_token) {
  request::Request request;
  request.id = engine_->NextRequestId();
  request.prompt_token_ids = std::move(prompt);
  request.sampling = sampling;
  request.arrival = clock_.Now();
  const request::RequestId id = request.id;
  const auto sink = std::make_shared<WaitingSink>();
  RETURN_IF_ERROR(engine_->Submit(std::move(request), sink));
  bool stopped = false;
  while (true) {
    const request::TokenEvent event = sink->Wait();
    for (const int32_t token_id : event.token_ids) {
      const bool is_end = event.finish_reason == request::FinishReason::kStop &&
                          &token_id == &event.token_ids.back();
      if (is_end || stopped) continue;
      stopped = !on_token(token_id);
      if (stopped) engine_->Cancel(id);
    }
    if (!event.finish_reason) continue;
    if (*event.finish_reason == request::FinishReason::kError) return event.error;
    return *event.finish_reason;
  }
}

}  // namespace fathom::app
