#include <fmt/format.h>
#include <sys/stat.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "apps/fathom/commands.h"
#include "apps/fathom/line_reader.h"
#include "apps/fathom/local_engine.h"
#include "apps/fathom/sampling_defaults.h"
#include "text/chat_encoder.h"
#include "text/detokenizer.h"
#include "text/reasoning_splitter.h"

namespace fathom::app {
namespace {

std::atomic<bool> interrupted{false};

// Ctrl-C ends the answer that is being written, not the program.
class InterruptScope {
 public:
  InterruptScope() {
    interrupted = false;
    old_ = std::signal(SIGINT, [](int) { interrupted = true; });
  }
  ~InterruptScope() { std::signal(SIGINT, old_); }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  void (*old_)(int);
};

// $XDG_STATE_HOME/fathom/chat_history, made when it is absent; empty without a home.
std::string HistoryFile() {
  const char* state = std::getenv("XDG_STATE_HOME");
  const char* home = std::getenv("HOME");
  std::string folder;
  if (state != nullptr && *state != '\0') {
    folder = std::string(state) + "/fathom";
  } else if (home != nullptr && *home != '\0') {
    folder = std::string(home) + "/.local/state/fathom";
  } else {
    return "";
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  return error ? "" : folder + "/chat_history";
}

json::Value Message(const char* role, std::string content) {
  return json::Value::Object(
      {{"role", json::Value::String(role)}, {"content", json::Value::String(std::move(content))}});
}

// One conversation: the messages so far, and how the next answer is made.
class Conversation {
 public:
  Conversation(LocalEngine& local, const ChatOptions& options) : local_(local), options_(options) {
    encode_.mode = options.thinking ? text::ThinkingMode::kThinking : text::ThinkingMode::kChat;
    encode_.effort = ParseEffort(options.effort);
    encode_.profile = ResolveEffortProfile("auto", local.session().folder, local.session().config);
    Clear();
  }

  void Clear() {
    messages_ = json::Value::Array();
    if (!options_.system.empty()) messages_.items().push_back(Message("system", options_.system));
  }

  // Answers on standard output. A message that does not fit is taken back.
  Status Say(const std::string& line) {
    messages_.items().push_back(Message("user", line));
    const Status status = Answer();
    if (!status.ok()) messages_.items().pop_back();
    return status;
  }

 private:
  Status Answer() {
    ASSIGN_OR_RETURN(const auto pieces, text::EncodeMessages(messages_, encode_));
    const text::Tokenizer& tokenizer = *local_.session().tokenizer;
    std::vector<int32_t> prompt =
        text::TokenizePieces(tokenizer, pieces, /*raw_special_tokens=*/false);
    request::SamplingParams sampling;
    sampling.temperature = options_.temperature;
    sampling.top_p = options_.top_p;
    sampling.max_tokens = options_.max_tokens;
    sampling.seed = std::random_device{}();

    text::IncrementalDetokenizer detokenizer(tokenizer);
    text::ReasoningSplitter splitter(options_.thinking);
    text::SplitText answer;
    const auto show = [&](const text::SplitText& part) {
      if (!part.reasoning.empty()) fmt::print("\x1b[2m{}\x1b[0m", part.reasoning);
      if (!part.content.empty() && answer.content.empty() && !answer.reasoning.empty())
        fmt::print("\n");
      fmt::print("{}", part.content);
      std::fflush(stdout);
      answer.reasoning += part.reasoning;
      answer.content += part.content;
    };
    const InterruptScope scope;
    ASSIGN_OR_RETURN(const request::FinishReason finish,
                     local_.Generate(std::move(prompt), sampling, [&](int32_t token_id) {
                       show(splitter.Push(detokenizer.Push(token_id)));
                       return !interrupted;
                     }));
    show(splitter.Push(detokenizer.Flush()));
    show(splitter.Flush());
    fmt::print("{}\n", finish == request::FinishReason::kLength      ? " [cut at the limit]"
                       : finish == request::FinishReason::kCancelled ? " [stopped]"
                                                                     : "");
    json::Value message = Message("assistant", answer.content);
    if (!answer.reasoning.empty()) message.Set("reasoning", json::Value::String(answer.reasoning));
    messages_.items().push_back(std::move(message));
    return OkStatus();
  }

  LocalEngine& local_;
  const ChatOptions& options_;
  text::EncodeOptions encode_;
  json::Value messages_;
};

}  // namespace

Status RunChat(const ChatOptions& options) {
  ModelOptions model_options = options.model;
  model_options.max_num_seqs = 1;
  ASSIGN_OR_RETURN(const auto local,
                   LocalEngine::Start(model_options, options.model.model, /*max_queue=*/1));
  fmt::print("{}: /clear starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer.\n",
             options.model.model);
  LineReader reader(HistoryFile());
  Conversation conversation(*local, options);
  while (const auto line = reader.Read("> ")) {
    if (line->empty()) continue;
    if (*line == "/exit") break;
    if (*line == "/clear") {
      conversation.Clear();
      continue;
    }
    const Status status = conversation.Say(*line);
    if (status.code() == StatusCode::kInvalidArgument) {
      fmt::print("{}\n", status.message());  // too long, say: the conversation goes on
    } else if (!status.ok()) {
      return status;
    }
  }
  return OkStatus();
}

}  // namespace fathom::app
