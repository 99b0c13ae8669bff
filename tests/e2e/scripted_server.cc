// scripted_server: `fathom serve` with a model that says what a script tells it to. Flags, HTTP,
// encoder, tokenizer, engine, scheduler, sampler and parser are the real ones; only the logits are
// made up.
//
//   scripted_server --script FILE MODEL [flags of `fathom serve`]
//
// FILE is a JSON array of rules, read anew for every prompt:
//   {"when": TEXT, "say": TEXT}   answer prompts that contain TEXT (default: all); text of special
//                                 tokens becomes their ids
//   "ids": [...]                  in place of "say"
//   "fail": TEXT                  the step of the first token fails with this message
//   "step_ms"                     how long each token takes
//   "until": PATH                 the first token waits until this file is there
// The last rule that fits wins. The next token has logit 60 and all others 0: sampling at a
// temperature of 1 draws another once in 10^20 tokens. The text ends with EOS.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "apps/fathom/model_session.h"
#include "apps/fathom/serve.h"
#include "apps/fathom/serve_flags.h"
#include "base/clock.h"
#include "checkpoint/checkpoint.h"
#include "engine/make_engine.h"
#include "json/json.h"
#include "runtime/testing/fake_model.h"

namespace fathom::app {
namespace {

constexpr float kScriptedLogit = 60.0f;
constexpr int64_t kDefaultModelLen = 131072;

struct Answer {
  std::vector<int32_t> ids;
  std::string failure;  // empty: none
  std::chrono::milliseconds step{0};
  std::string until;  // a path; empty: nothing is waited for
};

uint64_t HashMore(uint64_t hash, int32_t id) {
  return (hash ^ static_cast<uint32_t>(id)) * 0x9e3779b97f4a7c15ULL + (hash >> 29);
}

// What to say to each prompt. Prompts come from the API's threads, questions from the engine's.
class Script {
 public:
  Script(std::string path, const text::Tokenizer& tokenizer)
      : path_(std::move(path)), tokenizer_(tokenizer) {}

  Status AddPrompt(const std::vector<int32_t>& prompt) {
    ASSIGN_OR_RETURN(Answer answer, Find(tokenizer_.Decode(prompt, false)));
    uint64_t hash = 0;
    for (const int32_t id : prompt) hash = HashMore(hash, id);
    const std::lock_guard lock(mutex_);
    answers_[hash] = std::move(answer);
    return OkStatus();
  }

  // The token after `token_ids`, which begin with a prompt that was added; waits as the script
  // says.
  int32_t Next(std::span<const int32_t> token_ids, int32_t eos) const {
    Answer answer;
    size_t num_prompt_tokens = 0;
    {
      const std::lock_guard lock(mutex_);
      uint64_t hash = 0;
      for (size_t i = 0; i < token_ids.size(); ++i) {
        hash = HashMore(hash, token_ids[i]);
        const auto it = answers_.find(hash);
        if (it == answers_.end()) continue;
        answer = it->second;
        num_prompt_tokens = i + 1;
      }
    }
    if (!answer.failure.empty()) throw std::runtime_error(answer.failure);
    const size_t idx = token_ids.size() - num_prompt_tokens;
    if (idx == 0) WaitForFile(answer.until);
    std::this_thread::sleep_for(answer.step);
    return idx < answer.ids.size() ? answer.ids[idx] : eos;
  }

 private:
  Result<Answer> Find(const std::string& prompt) const {
    ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path_));
    ASSIGN_OR_RETURN(const json::Value rules, json::Parse(text));
    Answer answer;
    for (const json::Value& rule : rules.items()) {
      const json::Value* when = rule.Find("when");
      if (when != nullptr && prompt.find(when->AsString()) == std::string::npos) continue;
      answer = {.ids = {}, .failure = {}, .step = StepOf(rule), .until = {}};
      if (const json::Value* until = rule.Find("until")) answer.until = until->AsString();
      if (const json::Value* ids = rule.Find("ids")) {
        for (const json::Value& id : ids->items())
          answer.ids.push_back(static_cast<int32_t>(*id.ToInt64()));
      } else if (const json::Value* failure = rule.Find("fail")) {
        answer.failure = failure->AsString();
      } else {
        tokenizer_.Encode(rule.Find("say")->AsString(), text::Tokenizer::AddedTokens::kMatch,
                          &answer.ids);
      }
    }
    return answer;
  }
  static std::chrono::milliseconds StepOf(const json::Value& rule) {
    const json::Value* value = rule.Find("step_ms");
    return std::chrono::milliseconds(value == nullptr ? 0 : *value->ToInt64());
  }
  static void WaitForFile(const std::string& path) {
    while (!path.empty() && !std::filesystem::exists(path))
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  const std::string path_;
  const text::Tokenizer& tokenizer_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Answer> answers_;  // by the prompt's hash
};

// The real engine, told of each prompt before it runs.
class PromptedEngine final : public engine::Engine {
 public:
  PromptedEngine(std::unique_ptr<engine::Engine> engine, Script& script)
      : engine_(std::move(engine)), script_(script) {}

  Status Submit(request::Request request, std::shared_ptr<request::TokenSink> sink) override {
    RETURN_IF_ERROR(script_.AddPrompt(request.prompt_token_ids));
    return engine_->Submit(std::move(request), std::move(sink));
  }
  void Finish(request::RequestId id, request::FinishReason reason) override {
    engine_->Finish(id, reason);
  }
  void Drain(Duration timeout) override { engine_->Drain(timeout); }
  void ResetPrefixCache() override { engine_->ResetPrefixCache(); }
  engine::EngineStats Stats() const override { return engine_->Stats(); }
  request::RequestId NextRequestId() override { return engine_->NextRequestId(); }
  int64_t max_model_len() const override { return engine_->max_model_len(); }

 private:
  const std::unique_ptr<engine::Engine> engine_;
  Script& script_;
};

// MODEL, --script FILE, and the flags of the table.
Result<std::string> ParseArguments(std::vector<std::string> args, ServeOptions* options) {
  ASSIGN_OR_RETURN(args, FoldDottedFlags(args));
  std::string script;
  for (size_t i = 0; i < args.size(); ++i) {
    if (!args[i].starts_with("--")) {
      options->model.model = args[i];
      continue;
    }
    const size_t equals = args[i].find('=');
    const std::string name = args[i].substr(2, equals == std::string::npos ? equals : equals - 2);
    if (name == "script") {
      script = args.at(++i);
      continue;
    }
    const ServeFlag* flag = nullptr;
    for (const ServeFlag& known : ServeFlags()) {
      if (known.name == name) flag = &known;
    }
    if (flag == nullptr) return InvalidArgument("no flag --" + name);
    std::vector<std::string> values;
    if (flag->kind == FlagKind::kSwitch) {
      values = {"true"};
    } else if (equals != std::string::npos) {
      values = {args[i].substr(equals + 1)};
    } else {
      do {
        values.push_back(args.at(++i));
      } while (flag->kind == FlagKind::kList && i + 1 < args.size() &&
               !args[i + 1].starts_with("--"));
    }
    if (flag->apply) RETURN_IF_ERROR(flag->apply(values, *options));
  }
  if (script.empty() || options->model.model.empty())
    return InvalidArgument("usage: scripted_server --script FILE MODEL [flags]");
  return script;
}

Status Run(const std::vector<std::string>& args) {
  ServeOptions options;
  ASSIGN_OR_RETURN(const std::string script_path, ParseArguments(args, &options));
  const sigset_t signals = BlockStopSignals();
  ModelSession session;
  session.folder = options.model.model;
  ASSIGN_OR_RETURN(session.config, checkpoint::LoadModelConfig(session.folder));
  session.config.num_layers = runtime::kFakeLayers;
  session.config.num_experts = runtime::kFakeExperts;
  session.config.num_experts_per_token = runtime::kFakeExpertsPerToken;
  ASSIGN_OR_RETURN(session.tokenizer, text::Tokenizer::Load(session.folder + "/tokenizer.json"));
  ASSIGN_OR_RETURN(session.special_tokens, text::SpecialTokens::Find(*session.tokenizer));
  const auto device = device::MakeCpuDevice(1);

  Script script(script_path, *session.tokenizer);
  const int32_t eos = session.special_tokens.eos;
  runtime::FakeModel model(session.config.vocab_size, [&](std::span<const int32_t> token_ids,
                                                          int64_t, std::span<float> logits) {
    std::fill(logits.begin(), logits.end(), 0.0f);
    logits[static_cast<size_t>(script.Next(token_ids, eos))] = kScriptedLogit;
  });
  engine::EngineOptions engine_options;
  engine_options.model_name = ModelName(options);
  engine_options.vocab_size = session.config.vocab_size;
  engine_options.eos_token_ids = {eos};
  engine_options.num_layers = runtime::kFakeLayers;
  engine_options.num_experts_per_token = runtime::kFakeExpertsPerToken;
  engine_options.limits = {
      .max_batched_tokens = app::MaxBatchedTokens(options.model, device->kind()),
      .max_num_seqs = options.model.max_num_seqs,
      .max_model_len =
          options.model.max_model_len != 0 ? options.model.max_model_len : kDefaultModelLen};
  engine_options.max_queue = options.max_queue;
  MetricsRegistry metrics;
  const SystemClock clock;
  ASSIGN_OR_RETURN(auto engine,
                   engine::MakeEngine(
                       engine_options,
                       {{.model = &model, .device = device.get(), .layout = runtime::FakeLayout()}},
                       metrics, clock));
  PromptedEngine prompted(std::move(engine), script);
  return ServeUntilSignal(options, session, prompted, metrics, signals);
}

}  // namespace
}  // namespace fathom::app

int main(int argc, char** argv) {
  const fathom::Status status = fathom::app::Run({argv + 1, argv + argc});
  if (!status.ok()) fmt::print(stderr, "scripted_server: {}\n", status.message());
  return fathom::ExitCode(status);
}
