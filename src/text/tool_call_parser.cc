#include "text/tool_call_parser.h"

#include <algorithm>
#include <span>
#include <utility>

#include "text/chat_format.h"

namespace fathom::text {

enum class ToolCallParser::Tag : int {
  kThinkBegin,
  kThinkEnd,
  kToolsBegin,
  kToolsEnd,
  kInvokeBegin,  // without its attributes
  kInvokeEnd,
  kParameterBegin,  // likewise
  kParameterEnd,
};

struct ToolCallParser::TagMatch {
  enum { kNone, kPartial, kFull } kind = kNone;
  Tag tag{};
  size_t size = 0;
};

struct ToolCallParser::Header {
  enum { kIncomplete, kMalformed, kComplete } kind = kIncomplete;
  size_t size = 0;
  std::optional<std::string> name;
  std::optional<bool> is_string;
};

namespace {

using Kind = OutputEvent::Kind;

// A tag whose attributes go on for longer is no tag.
constexpr size_t kMaxHeaderBytes = 4096;

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::string_view Trim(std::string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

// The attributes after a tag's name: key="value" and white space up to ">". Values hold anything
// but quotes. Calls `take(key, value)` for each; returns the size up to and with ">", 0 when `text`
// is malformed, npos when it ends too early.
template <typename Take>
size_t ReadAttributes(std::string_view text, const Take& take) {
  constexpr size_t kTooShort = std::string_view::npos;
  size_t pos = 0;
  while (true) {
    const size_t spaces = pos;
    while (pos < text.size() && IsSpace(text[pos])) ++pos;
    if (pos == text.size()) return kTooShort;
    if (text[pos] == '>') return pos + 1;
    if (pos == spaces) return 0;
    const size_t equals = text.find_first_of("=\"<> \n", pos);
    if (equals == std::string_view::npos || equals + 1 == text.size()) return kTooShort;
    if (text[equals] != '=' || text[equals + 1] != '"') return 0;
    const size_t quote = text.find('"', equals + 2);
    if (quote == std::string_view::npos) return kTooShort;
    take(text.substr(pos, equals - pos), text.substr(equals + 2, quote - equals - 2));
    pos = quote + 1;
  }
}

}  // namespace

void OutputMessage::Add(const std::vector<OutputEvent>& events) {
  for (const OutputEvent& event : events) {
    switch (event.kind) {
      case Kind::kReasoning:
        reasoning += event.text;
        break;
      case Kind::kContent:
        content += event.text;
        break;
      case Kind::kToolCallBegin:
        tool_calls.push_back({event.text, "", false});
        break;
      case Kind::kArguments:
        tool_calls.back().arguments += event.text;
        break;
      case Kind::kToolCallEnd:
        tool_calls.back().is_complete = true;
        break;
    }
  }
}

ToolCallParser::ToolCallParser(Options options)
    : options_(std::move(options)), in_reasoning_(options_.in_reasoning) {}

void ToolCallParser::Push(std::string_view text, std::vector<OutputEvent>* events) {
  events_ = events;
  first_event_ = events->size();
  buffer_ += text;
  while (Step()) {
  }
  buffer_.erase(0, pos_);
  pos_ = 0;
  events_ = nullptr;
}

void ToolCallParser::Finish(bool is_natural, std::vector<OutputEvent>* events) {
  events_ = events;
  first_event_ = events->size();
  const bool in_call = state_ != State::kText && state_ != State::kBlock;
  // What was held back might have become markup. A limit that cut a parameter probably cut its
  // closing tag.
  if (!in_call || is_natural) TakePlain(Rest());
  Consume(Rest().size());
  if (state_ == State::kBlock) CloseBlock();
  if (in_call && is_natural) {
    CloseParameter();
    EndCall();
  } else if (wrapper_.has_value()) {
    WriteParameter(*wrapper_);
  }
  events_ = nullptr;
}

// Takes the next stretch of text or markup; false when more input has to decide.
bool ToolCallParser::Step() {
  const std::string_view rest = Rest();
  if (rest.empty()) return false;
  const bool may_start_block = state_ == State::kText && options_.parse_tool_calls;
  const size_t at = std::min(rest.find_first_of(may_start_block ? "<\n" : "<"), rest.size());
  if (at > 0) {
    TakePlain(rest.substr(0, at));
    Consume(at);
    return true;
  }
  const TagMatch match = MatchTag(rest);
  if (match.kind == TagMatch::kPartial) return false;
  if (match.kind == TagMatch::kFull) return TakeTag(match.tag, match.size);
  TakePlain(rest.substr(0, 1));
  Consume(1);
  return true;
}

ToolCallParser::TagMatch ToolCallParser::MatchTag(std::string_view rest) const {
  struct TagText {
    std::string_view text;
    Tag tag;
  };
  static constexpr TagText kTextTags[] = {{kThinkBeginToken, Tag::kThinkBegin},
                                          {kThinkEndToken, Tag::kThinkEnd},
                                          {"<｜DSML｜tool_calls>", Tag::kToolsBegin},
                                          {"\n\n<｜DSML｜tool_calls>", Tag::kToolsBegin}};
  static constexpr TagText kBlockTags[] = {{"<｜DSML｜invoke", Tag::kInvokeBegin},
                                           {"</｜DSML｜tool_calls>", Tag::kToolsEnd}};
  static constexpr TagText kInvokeTags[] = {{"<｜DSML｜parameter", Tag::kParameterBegin},
                                            {"</｜DSML｜invoke>", Tag::kInvokeEnd},
                                            {"<｜DSML｜invoke", Tag::kInvokeBegin},
                                            {"</｜DSML｜tool_calls>", Tag::kToolsEnd}};
  // A parameter that the model forgot to close ends where the next thing begins.
  static constexpr TagText kValueTags[] = {{"</｜DSML｜parameter>", Tag::kParameterEnd},
                                           {"<｜DSML｜parameter name=", Tag::kParameterBegin},
                                           {"</｜DSML｜invoke>", Tag::kInvokeEnd},
                                           {"</｜DSML｜tool_calls>", Tag::kToolsEnd}};
  std::span<const TagText> tags = kValueTags;
  if (state_ == State::kText) tags = std::span(kTextTags).first(options_.parse_tool_calls ? 4 : 2);
  if (state_ == State::kBlock) tags = kBlockTags;
  if (state_ == State::kInvoke) tags = kInvokeTags;
  TagMatch match;
  for (const TagText& tag : tags) {
    if (rest.starts_with(tag.text)) return {TagMatch::kFull, tag.tag, tag.text.size()};
    if (tag.text.starts_with(rest)) match.kind = TagMatch::kPartial;
  }
  return match;
}

void ToolCallParser::TakePlain(std::string_view text) {
  switch (state_) {
    case State::kText:
      return Emit(in_reasoning_ ? Kind::kReasoning : Kind::kContent, text);
    case State::kString:
      return Emit(Kind::kArguments, json::Escape(text));
    case State::kValue:
      parameter_.text += text;
      return;
    case State::kBlock:
    case State::kInvoke:
    case State::kIgnored:
      return;
  }
}

bool ToolCallParser::TakeTag(Tag tag, size_t size) {
  switch (tag) {
    case Tag::kThinkBegin:
    case Tag::kThinkEnd:
      in_reasoning_ = tag == Tag::kThinkBegin;
      break;
    case Tag::kToolsBegin:
      state_ = State::kBlock;
      block_has_call_ = false;
      break;
    case Tag::kInvokeBegin:
      return OpenInvoke(size);
    case Tag::kParameterBegin:
      if (state_ == State::kInvoke) return OpenParameter(size);
      CloseParameter();
      return true;
    case Tag::kParameterEnd:
      CloseParameter();
      break;
    case Tag::kInvokeEnd:
      CloseParameter();
      EndCall();
      break;
    case Tag::kToolsEnd:
      if (state_ != State::kBlock) {
        CloseParameter();
        EndCall();
      }
      Consume(size);
      CloseBlock();
      return true;
  }
  Consume(size);
  return true;
}

ToolCallParser::Header ToolCallParser::ReadHeader(std::string_view rest, size_t tag_size) {
  Header header;
  const size_t size =
      ReadAttributes(rest.substr(tag_size), [&](std::string_view key, std::string_view value) {
        if (key == "name") header.name = value;
        if (key == "string" && (value == "true" || value == "false")) {
          header.is_string = value == "true";
        }
      });
  const bool is_short = size == std::string_view::npos;
  header.size = tag_size + size;
  if (is_short ? rest.size() > kMaxHeaderBytes : header.size > kMaxHeaderBytes) {
    header.kind = Header::kMalformed;
  } else if (!is_short) {
    header.kind = size > 0 && header.name.has_value() ? Header::kComplete : Header::kMalformed;
  }
  return header;
}

bool ToolCallParser::OpenInvoke(size_t tag_size) {
  const Header header = ReadHeader(Rest(), tag_size);
  if (header.kind == Header::kIncomplete) return false;
  if (header.kind == Header::kMalformed || header.name->empty()) {
    Consume(1);
    return true;
  }
  if (state_ == State::kInvoke) EndCall();
  Consume(header.size);
  BeginCall(*header.name);
  return true;
}

bool ToolCallParser::OpenParameter(size_t tag_size) {
  const Header header = ReadHeader(Rest(), tag_size);
  if (header.kind == Header::kIncomplete) return false;
  if (header.kind == Header::kMalformed) {
    Consume(1);
    return true;
  }
  Consume(header.size);
  if (!seen_.insert(*header.name).second) {
    state_ = State::kIgnored;
    return true;
  }
  if (wrapper_.has_value()) WriteParameter(*std::exchange(wrapper_, std::nullopt));
  parameter_ = {*header.name, header.is_string.value_or(false), ""};
  if (parameter_.is_string && !MayBeWrapper(parameter_.name)) {
    state_ = State::kString;
    WriteKey(parameter_.name);
    Emit(Kind::kArguments, "\"");
  } else {
    state_ = State::kValue;
  }
  return true;
}

void ToolCallParser::CloseParameter() {
  if (state_ == State::kString) Emit(Kind::kArguments, "\"");
  if (state_ == State::kValue) {
    if (MayBeWrapper(parameter_.name)) {
      wrapper_ = std::move(parameter_);
    } else {
      WriteParameter(parameter_);
    }
  }
  state_ = State::kInvoke;
}

void ToolCallParser::BeginCall(const std::string& name) {
  state_ = State::kInvoke;
  block_has_call_ = true;
  block_text_.clear();
  in_ignored_call_ = !options_.parallel && num_calls_ > 0;
  if (in_ignored_call_) {
    dropped_calls_ = true;
  } else {
    ++num_calls_;
  }
  const auto schema = std::ranges::find(options_.tools, name, &ToolSchema::name);
  schema_ = schema != options_.tools.end() ? &*schema : nullptr;
  wrote_parameter_ = false;
  seen_.clear();
  wrapper_.reset();
  Emit(Kind::kToolCallBegin, name);
}

void ToolCallParser::EndCall() {
  state_ = State::kBlock;
  if (wrapper_.has_value()) {
    const Parameter wrapper = *std::exchange(wrapper_, std::nullopt);
    if (const auto arguments = Unwrapped(wrapper); arguments.has_value()) {
      Emit(Kind::kArguments, *arguments);
      return Emit(Kind::kToolCallEnd, "");
    }
    WriteParameter(wrapper);
  }
  Emit(Kind::kArguments, wrote_parameter_ ? "}" : "{}");
  Emit(Kind::kToolCallEnd, "");
}

void ToolCallParser::CloseBlock() {
  state_ = State::kText;
  in_reasoning_ = false;
  Emit(Kind::kContent, std::exchange(block_text_, ""));
}

void ToolCallParser::WriteKey(const std::string& name) {
  Emit(Kind::kArguments, (wrote_parameter_ ? ", " : "{") + json::Quote(name) + ": ");
  wrote_parameter_ = true;
}

void ToolCallParser::WriteParameter(const Parameter& parameter) {
  WriteKey(parameter.name);
  Emit(Kind::kArguments, ValueJson(parameter));
}

// What is not marked as a text is JSON where it can be read as such and the schema does not want a
// text.
std::string ToolCallParser::ValueJson(const Parameter& parameter) const {
  if (parameter.is_string) return json::Quote(parameter.text);
  const ToolParameter* known = schema_ != nullptr ? schema_->Find(parameter.name) : nullptr;
  const std::string_view trimmed = Trim(parameter.text);
  const auto value = json::Parse(trimmed);
  const bool wants_text = known != nullptr && known->is_string;
  if (!value.ok() || (wants_text && !value->is_string())) return json::Quote(parameter.text);
  return std::string(trimmed);
}

// Models sometimes put all arguments into one parameter of a name that the tool does not have.
bool ToolCallParser::MayBeWrapper(const std::string& name) const {
  return !wrote_parameter_ && schema_ != nullptr && (name == "arguments" || name == "input") &&
         schema_->Find(name) == nullptr;
}

std::optional<std::string> ToolCallParser::Unwrapped(const Parameter& parameter) const {
  const auto value = json::Parse(Trim(parameter.text));
  if (!value.ok() || !value->is_object()) return std::nullopt;
  for (const json::Member& member : value->members()) {
    if (schema_->Find(member.key) == nullptr) return std::nullopt;
  }
  return json::DumpPython(*value);
}

void ToolCallParser::Emit(Kind kind, std::string_view text) {
  const bool of_call = kind != Kind::kReasoning && kind != Kind::kContent;
  if (of_call && in_ignored_call_) return;
  const bool is_piece = kind != Kind::kToolCallBegin && kind != Kind::kToolCallEnd;
  if (is_piece && text.empty()) return;
  if (is_piece && events_->size() > first_event_ && events_->back().kind == kind) {
    events_->back().text += text;
    return;
  }
  events_->push_back({kind, std::string(text), of_call ? num_calls_ - 1 : -1});
}

void ToolCallParser::Consume(size_t size) {
  if (state_ == State::kBlock && !block_has_call_) block_text_ += Rest().substr(0, size);
  pos_ += size;
}

}  // namespace fathom::text
