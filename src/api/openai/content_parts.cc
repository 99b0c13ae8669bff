#include "api/openai/content_parts.h"

#include <fmt/format.h>

#include "api/field_reader.h"

namespace fathom::api::openai {
namespace {

Parsed<std::string> ReadPart(const json::Value& part, const std::string& param) {
  if (part.is_string()) return part.AsString();
  const json::Value* type_value = part.Find("type");
  if (type_value == nullptr || !type_value->is_string()) {
    return BadRequest(fmt::format("{} must be an object with a type", param), param);
  }
  const std::string& type = type_value->AsString();
  const bool is_text = type == "text" || type == "input_text" || type == "output_text";
  if (is_text || type == "refusal") {
    const json::Value* text = part.Find(is_text ? "text" : "refusal");
    if (text != nullptr && text->is_string()) return text->AsString();
    return BadRequest(fmt::format("{} has no text", param), param);
  }
  for (const std::string_view kind : {"image", "audio", "video", "file"}) {
    if (type.find(kind) != std::string::npos) {
      return BadRequest(fmt::format("{} content is not supported by this model: send text", kind),
                        param);
    }
  }
  return BadRequest(
      fmt::format("{}.type {} is not known: send text", param, ShortDump(*type_value)), param);
}

}  // namespace

Parsed<std::optional<std::string>> ReadContent(const json::Value* content,
                                               const std::string& param) {
  if (content == nullptr || content->is_null()) return std::optional<std::string>();
  if (content->is_string()) return std::optional(content->AsString());
  if (!content->is_array()) {
    return BadRequest(
        fmt::format("{} must be a string or an array of parts, got {}", param, KindName(*content)),
        param);
  }
  std::string joined;
  for (size_t i = 0; i < content->items().size(); ++i) {
    Parsed<std::string> part = ReadPart(content->items()[i], fmt::format("{}[{}]", param, i));
    if (!part.ok()) return part.error();
    if (i > 0) joined += "\n\n";
    joined += *part;
  }
  return std::optional(std::move(joined));
}

}  // namespace fathom::api::openai
