// ChoiceText: one sequence's tokens to what its client sees: detokenized, split into reasoning,
// content and tool calls, ended at stop strings. Text is held back only while it may still become a
// tag, a stop string or a whole character; the deltas of a response concatenate to the same text
// however the tokens arrive. One thread, one sequence.
//
// Stop strings are looked for in the content only, never in the reasoning or a call.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/stop_matcher.h"
#include "request/request.h"
#include "text/detokenizer.h"
#include "text/tool_call_parser.h"

namespace fathom::api {

struct ChoiceFinish {
  bool is_length = false;                  // else it stopped by itself
  bool has_tool_calls = false;             // complete ones
  bool dropped_calls = false;              // calls beyond the first were left out
  std::optional<std::string> stop_string;  // the stop string that ended it
  std::optional<int32_t> stop_token_id;    // the end or stop id that ended it
};

// What one event adds to a choice.
struct ChoiceDelta {
  std::vector<text::OutputEvent> events;  // of a text completion: content only
  std::vector<int32_t> token_ids;
  std::vector<request::TokenLogprobs> logprobs;         // of the tokens whose text shows
  std::vector<request::TokenLogprobs> prompt_logprobs;  // with the first event
  std::vector<uint16_t> routed_experts;                 // request.h's, up to the last token
  std::optional<int> num_processed_tokens;  // of the prompt; such a delta has nothing else
  std::optional<ChoiceFinish> finish;
};

class ChoiceText {
 public:
  struct Options {
    // Of a chat: how its answer is parsed. Unset: the text is content as it is.
    std::optional<text::ToolCallParser::Options> parser = std::nullopt;
    std::vector<std::string> stop = {};
    bool include_stop_string = false;
    int min_tokens = 0;                    // no stop string ends the text before
    std::vector<int32_t> hidden_ids = {};  // control tokens whose text never shows
  };

  ChoiceText(const text::Tokenizer& tokenizer, Options options);

  // Takes one engine event. The delta may finish before the engine does (a stop string); tokens
  // after that are not counted. Not to be called after a finish.
  ChoiceDelta Push(request::TokenEvent event);

  // Calls `listener` with all tokens when the text finishes.
  void OnFinish(std::function<void(std::vector<int32_t>)> listener) {
    on_finish_ = std::move(listener);
  }

  int num_tokens() const { return num_tokens_; }
  int num_reasoning_tokens() const { return num_reasoning_tokens_; }
  int num_cached_tokens() const { return num_cached_tokens_; }

 private:
  void PushToken(int32_t id, ChoiceDelta* delta);
  void PushText(const std::string& text, ChoiceDelta* delta);
  // Lets the content among `events` through the stop strings; nothing follows a match.
  void PushEvents(std::vector<text::OutputEvent> events, ChoiceDelta* delta);
  void PushContent(const std::string& content, ChoiceDelta* delta);
  void Flush(bool is_natural, ChoiceDelta* delta);

  const Options options_;
  text::IncrementalDetokenizer detokenizer_;
  std::optional<text::ToolCallParser> parser_;
  StopMatcher stops_;
  std::function<void(std::vector<int32_t>)> on_finish_;
  std::vector<int32_t> token_ids_;  // so far, for on_finish_
  bool has_tool_calls_ = false;
  int num_tokens_ = 0;
  int num_reasoning_tokens_ = 0;
  int num_cached_tokens_ = 0;
};

}  // namespace fathom::api
