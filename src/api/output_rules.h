// OutputRules: what a request asks of its answer's form (response_format, structured_outputs,
// tool_choice), the same for every dialect, and the grammar that holds an answer to it. Reading is
// pure; any thread.
//
// A dialect reads its fields into OutputRules, renders its prompt, calls PrepareGrammar, and gives
// what comes to MakeChoice: each sequence gets a constraint of its own.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/api_error.h"
#include "api/field_reader.h"
#include "api/server_context.h"
#include "http/response_writer.h"
#include "json/json.h"
#include "text/grammar.h"
#include "text/output_format.h"

namespace fathom::api {

struct OutputRules {
  std::optional<json::Value> content;         // a format of text/output_format.h; unset: any text
  std::optional<text::ToolCallFormat> calls;  // unset: calls are not held to the tools
};

// response_format: {type: text | json_object | json_schema | structural_tag, …}, at most one of
// structured_outputs and its older forms guided_json, guided_regex, guided_choice, guided_grammar.
void ReadContentRules(FieldReader* fields, OutputRules* rules);

// One format object, as response_format or the Responses API's text.format has it: {type: …},
// where json_schema's own fields stand in `json_schema` or beside the type. Unset for text.
Parsed<std::optional<json::Value>> ReadFormat(const json::Value& format, std::string_view place);

// What tool_choice says, in every dialect's words.
struct ToolChoice {
  enum class Mode { kAuto, kNone, kRequired };
  Mode mode = Mode::kAuto;
  std::string name;                  // not empty: this function, once
  std::vector<std::string> allowed;  // not empty: these functions only
  bool parallel = true;              // more than one call per answer
};

// The calls' rules for `tools` ({type, function} objects, valid): required and named calls are held
// to the tools' schemas; so are a model's own (auto) if a tool asks for it with "strict": true, or
// only some may be called.
// 400: no tool has the name, or the content has a form of its own.
MaybeError ReadCallRules(const json::Value& tools, const ToolChoice& choice, OutputRules* rules);

using GrammarPtr = std::shared_ptr<const text::Grammar>;  // null: nothing is asked

// Calls `then` on the connection's executor: at once when nothing is asked, else when the grammar
// has been compiled. An error is the format's (400), or too many are waiting (503). `in_reasoning`:
// the prompt ended with <think>.
void PrepareGrammar(const ServerContext& context, const OutputRules& rules, bool in_reasoning,
                    const std::shared_ptr<http::ResponseWriter>& writer,
                    std::function<void(Parsed<GrammarPtr>)> then);

}  // namespace fathom::api
