#include "apps/fathom/sampling_defaults.h"

#include <fmt/format.h>

#include <filesystem>

#include "apps/fathom/model_session.h"

namespace fathom::app {
namespace {

Status ReadDouble(const json::Value& config, const char* key, double low, double high,
                  double* out) {
  const json::Value* value = config.Find(key);
  if (value == nullptr || value->is_null()) return OkStatus();
  const auto number = value->ToDouble();
  if (!number || *number < low || *number > high) {
    return InvalidArgument(fmt::format("{} is {}, expected a number from {} to {}", key,
                                       json::Dump(*value), low, high));
  }
  *out = *number;
  return OkStatus();
}

Status Apply(const json::Value& config, request::SamplingParams* params) {
  RETURN_IF_ERROR(ReadDouble(config, "temperature", 0, 2, &params->temperature));
  RETURN_IF_ERROR(ReadDouble(config, "top_p", 1e-9, 1, &params->top_p));
  RETURN_IF_ERROR(ReadDouble(config, "min_p", 0, 1, &params->min_p));
  RETURN_IF_ERROR(
      ReadDouble(config, "repetition_penalty", 0.001, 100, &params->repetition_penalty));
  double top_k = params->top_k;
  RETURN_IF_ERROR(ReadDouble(config, "top_k", -1, 1 << 30, &top_k));
  params->top_k = std::max(0, static_cast<int>(top_k));
  const json::Value* do_sample = config.Find("do_sample");
  if (do_sample != nullptr && do_sample->is_bool() && !do_sample->AsBool()) params->temperature = 0;
  return OkStatus();
}

}  // namespace

Result<request::SamplingParams> SamplingDefaults(const std::string& folder,
                                                 const json::Value& overrides) {
  request::SamplingParams params;
  const std::string file = folder + "/generation_config.json";
  if (!folder.empty() && std::filesystem::exists(file)) {
    ASSIGN_OR_RETURN(const std::string text, ReadTextFile(file));
    const auto config = json::Parse(text);
    const Status status = config.ok() ? Apply(*config, &params) : config.status();
    if (!status.ok()) return BadModel(fmt::format("{}: {}", file, status.message()));
  }
  const Status status = Apply(overrides, &params);
  if (!status.ok()) return InvalidArgument("--override-generation-config: " + status.message());
  return params;
}

}  // namespace fathom::app
