#include "api/choice_text.h"

#include <algorithm>
#include <utility>

namespace fathom::api {

using request::FinishReason;
using Kind = text::OutputEvent::Kind;

namespace {

// Appends to the last event when both are pieces of one text.
void AddEvent(text::OutputEvent event, ChoiceDelta* delta) {
  const bool is_piece = event.kind != Kind::kToolCallBegin && event.kind != Kind::kToolCallEnd;
  if (is_piece && event.text.empty()) return;
  std::vector<text::OutputEvent>& events = delta->events;
  if (is_piece && !events.empty() && events.back().kind == event.kind) {
    events.back().text += event.text;
  } else {
    events.push_back(std::move(event));
  }
}

}  // namespace

ChoiceText::ChoiceText(const text::Tokenizer& tokenizer, Options options)
    : options_(std::move(options)),
      detokenizer_(tokenizer),
      stops_(options_.stop, options_.include_stop_string) {
  if (options_.parser) parser_.emplace(*options_.parser);
}

ChoiceDelta ChoiceText::Push(request::TokenEvent event) {
  ChoiceDelta delta;
  num_cached_tokens_ = std::max(num_cached_tokens_, event.num_cached_tokens);
  delta.num_processed_tokens = event.num_processed_tokens;
  delta.prompt_logprobs = std::move(event.prompt_logprobs);
  delta.routed_experts = std::move(event.routed_experts);
  for (size_t i = 0; i < event.token_ids.size() && !delta.finish; ++i) {
    const int32_t id = event.token_ids[i];
    delta.token_ids.push_back(id);
    ++num_tokens_;
    const bool is_last = event.finish_reason && i + 1 == event.token_ids.size();
    if (is_last && event.stop_token_id == id) break;  // the end token ends; it is no text
    if (i < event.logprobs.size()) delta.logprobs.push_back(std::move(event.logprobs[i]));
    PushToken(id, &delta);
  }
  if (!delta.finish && event.finish_reason) {
    const bool is_length = *event.finish_reason == FinishReason::kLength;
    Flush(!is_length, &delta);
    if (!delta.finish) {
      delta.finish = ChoiceFinish{.is_length = is_length,
                                  .has_tool_calls = has_tool_calls_,
                                  .dropped_calls = parser_ && parser_->dropped_calls(),
                                  .stop_string = std::nullopt,
                                  .stop_token_id = event.stop_token_id};
    }
  }
  if (on_finish_) {
    token_ids_.insert(token_ids_.end(), delta.token_ids.begin(), delta.token_ids.end());
    if (delta.finish) on_finish_(std::exchange(token_ids_, {}));
  }
  return delta;
}

void ChoiceText::PushToken(int32_t id, ChoiceDelta* delta) {
  const bool was_reasoning = parser_ && parser_->in_reasoning();
  const auto& hidden = options_.hidden_ids;
  if (std::find(hidden.begin(), hidden.end(), id) == hidden.end()) {
    PushText(detokenizer_.Push(id), delta);
  }
  // The tag itself is not counted.
  if (was_reasoning && parser_->in_reasoning()) ++num_reasoning_tokens_;
}

void ChoiceText::PushText(const std::string& text, ChoiceDelta* delta) {
  if (!parser_) return PushContent(text, delta);
  std::vector<text::OutputEvent> events;
  parser_->Push(text, &events);
  PushEvents(std::move(events), delta);
}

void ChoiceText::PushEvents(std::vector<text::OutputEvent> events, ChoiceDelta* delta) {
  for (text::OutputEvent& event : events) {
    if (delta->finish) return;
    if (event.kind == Kind::kContent) {
      PushContent(event.text, delta);
    } else {
      AddEvent({Kind::kContent, stops_.Flush(), -1}, delta);  // no stop string spans a tag
      if (event.kind == Kind::kToolCallEnd) has_tool_calls_ = true;
      AddEvent(std::move(event), delta);
    }
  }
}

void ChoiceText::PushContent(const std::string& content, ChoiceDelta* delta) {
  if (num_tokens_ <= options_.min_tokens)
    return AddEvent({Kind::kContent, stops_.PushUnmatched(content), -1}, delta);
  AddEvent({Kind::kContent, stops_.Push(content), -1}, delta);
  if (stops_.matched()) {
    delta->finish = ChoiceFinish{.is_length = false,
                                 .has_tool_calls = has_tool_calls_,
                                 .dropped_calls = parser_ && parser_->dropped_calls(),
                                 .stop_string = stops_.matched(),
                                 .stop_token_id = std::nullopt};
  }
}

void ChoiceText::Flush(bool is_natural, ChoiceDelta* delta) {
  PushText(detokenizer_.Flush(), delta);
  if (parser_ && !delta->finish) {
    std::vector<text::OutputEvent> events;
    parser_->Finish(is_natural, &events);
    PushEvents(std::move(events), delta);
  }
  if (!delta->finish) AddEvent({Kind::kContent, stops_.Flush(), -1}, delta);
}

}  // namespace fathom::api
