#include "apps/fathom/flag_builders.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fathom::app {

Status NotANumber(const char* flag, const std::string& text, const std::string& low,
                  const std::string& high) {
  return InvalidArgument(
      fmt::format("--{}: '{}' is not a number from {} to {}", flag, text, low, high));
}

Result<int64_t> ParseSize(const std::string& text, const char* flag, int64_t low) {
  int64_t scale = 1;
  std::string digits = text;
  if (!digits.empty()) {
    switch (digits.back()) {
      case 'k':
      case 'K':
        scale = int64_t{1} << 10;
        break;
      case 'm':
      case 'M':
        scale = int64_t{1} << 20;
        break;
      case 'g':
      case 'G':
        scale = int64_t{1} << 30;
        break;
      default:
        break;
    }
    if (scale != 1) digits.pop_back();
  }
  ASSIGN_OR_RETURN(const int64_t n, ParseNumber<int64_t>(digits, low, int64_t{1} << 50, flag));
  if (n > (int64_t{1} << 50) / scale) {
    return InvalidArgument(fmt::format("--{}: '{}' is too large", flag, text));
  }
  return n * scale;
}

Result<json::Value> ParseObject(const std::string& text, const char* flag) {
  auto value = json::Parse(text);
  if (!value.ok()) {
    return InvalidArgument(fmt::format("--{}: {}", flag, value.status().message()));
  }
  if (!value->is_object()) return InvalidArgument(fmt::format("--{} expects a JSON object", flag));
  return value;
}

ApplyFlag OneOf(std::string flag, FlagValues accepted) {
  return [flag, accepted](const FlagValues& values, ServeOptions&) -> Status {
    if (std::find(accepted.begin(), accepted.end(), values[0]) != accepted.end()) return OkStatus();
    return InvalidArgument(fmt::format("--{}: '{}' is not available; use {}", flag, values[0],
                                       fmt::join(accepted, " or ")));
  };
}

ServeFlag Works(std::string name, std::string value_name, std::string help, ApplyFlag apply,
                FlagKind kind) {
  return {.name = std::move(name),
          .kind = kind,
          .effect = FlagEffect::kWorks,
          .value_name = std::move(value_name),
          .help = std::move(help),
          .apply = std::move(apply)};
}

ServeFlag NoEffect(std::string name, FlagKind kind, std::string why, ApplyFlag apply,
                   bool negatable) {
  return {.name = std::move(name),
          .kind = kind,
          .effect = FlagEffect::kNoEffect,
          .value_name = "VALUE",
          .help = std::move(why),
          .negatable = negatable,
          .apply = std::move(apply)};
}

ServeFlag Refused(std::string name, FlagKind kind, std::string why) {
  ApplyFlag refuse = [name, why](const FlagValues&, ServeOptions&) {
    return InvalidArgument(fmt::format("--{} is not available: {}", name, why));
  };
  return {.name = name,
          .kind = kind,
          .effect = FlagEffect::kRefused,
          .value_name = "VALUE",
          .help = why,
          .apply = std::move(refuse)};
}

}  // namespace fathom::app
