#include "api/replay/restore.h"

#include <algorithm>
#include <memory>
#include <string>

namespace fathom::api {
namespace {

using json::Value;

std::string WithoutSpace(std::string_view text) {
  std::string out;
  std::copy_if(text.begin(), text.end(), std::back_inserter(out),
               [](char c) { return c != ' ' && c != '\n' && c != '\r' && c != '\t'; });
  return out;
}

// The same JSON value; the order of keys does not count, a number's spelling neither.
bool AreEqual(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Value::Kind::kNull:
      return true;
    case Value::Kind::kBool:
      return a.AsBool() == b.AsBool();
    case Value::Kind::kNumber:
      return a.lexeme() == b.lexeme() || a.ToDouble() == b.ToDouble();
    case Value::Kind::kString:
      return a.AsString() == b.AsString();
    case Value::Kind::kArray:
      return std::ranges::equal(a.items(), b.items(), AreEqual);
    case Value::Kind::kObject:
      return a.members().size() == b.members().size() &&
             std::ranges::all_of(a.members(), [&](const json::Member& member) {
               const Value* other = b.Find(member.key);
               return other != nullptr && AreEqual(member.value, *other);
             });
  }
  return false;
}

bool AreEqualArguments(const std::string& a, const std::string& b) {
  if (a == b) return true;
  const auto parsed_a = json::Parse(a);
  const auto parsed_b = json::Parse(b);
  return parsed_a.ok() && parsed_b.ok() && AreEqual(*parsed_a, *parsed_b);
}

std::string TextOf(const Value& object, std::string_view key) {
  const Value* value = object.Find(key);
  return value != nullptr && value->is_string() ? value->AsString() : "";
}

const std::vector<Value>& ItemsOf(const Value& object, std::string_view key) {
  static const std::vector<Value> kNone;
  const Value* value = object.Find(key);
  return value != nullptr && value->is_array() ? value->items() : kNone;
}

bool SaysTheSame(const text::OutputMessage& sampled, const Value& message) {
  const std::vector<Value>& calls = ItemsOf(message, "tool_calls");
  if (calls.size() != sampled.tool_calls.size()) return false;
  for (size_t i = 0; i < calls.size(); ++i) {
    const Value* function = calls[i].Find("function");
    if (function == nullptr || TextOf(*function, "name") != sampled.tool_calls[i].name ||
        !AreEqualArguments(TextOf(*function, "arguments"), sampled.tool_calls[i].arguments)) {
      return false;
    }
  }
  return WithoutSpace(TextOf(message, "content")) == WithoutSpace(sampled.content);
}

std::shared_ptr<const ReplayRecord> FindRecord(ReplayStore& store, std::string_view scope,
                                               const Value& message) {
  for (const Value& key : ItemsOf(message, "replay_keys")) {
    if (!key.is_string()) continue;
    if (auto record = store.Find(scope, key.AsString())) return record;
  }
  for (const Value& call : ItemsOf(message, "tool_calls")) {
    const std::string id = TextOf(call, "id");
    if (id.empty()) continue;
    if (auto record = store.Find(scope, id)) return record;
  }
  return nullptr;
}

}  // namespace

text::SampledTurns RestoreSampledTurns(ReplayStore& store, std::string_view scope,
                                       Value* messages) {
  text::SampledTurns turns;
  for (Value& message : messages->items()) {
    if (TextOf(message, "role") != "assistant" || message.Find("wo_eos") != nullptr) continue;
    const std::shared_ptr<const ReplayRecord> record = FindRecord(store, scope, message);
    if (record == nullptr) continue;
    if (SaysTheSame(record->message, message)) {
      message.Set("sampled", Value::Number(static_cast<int64_t>(turns.size())));
      turns.emplace_back(record, &record->turn);
    } else if (TextOf(message, "reasoning").empty()) {
      message.Set("reasoning", Value::String(record->message.reasoning));
    }
  }
  return turns;
}

}  // namespace fathom::api
