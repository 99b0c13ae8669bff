#include "apps/fathom/flag_builders.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fathom::app {

std::string NotAvailable(const std::string& text, const FlagValues& known) {
  return fmt::format("'{}' is not available; use {}", text, fmt::join(known, " or "));
}

Result<int64_t> ParseSize(const std::string& text, const char* flag, int64_t low) {
  constexpr int64_t kMost = int64_t{1} << 50;
  const std::string suffixes = "kKmMgG";
  const size_t suffix = text.empty() ? std::string::npos : suffixes.find(text.back());
  const bool has_suffix = suffix != std::string::npos;
  const int64_t scale = has_suffix ? int64_t{1} << 10 * (suffix / 2 + 1) : 1;
  const auto number = ToNumber<int64_t>(has_suffix ? text.substr(0, text.size() - 1) : text,
                                        (low + scale - 1) / scale, kMost / scale);
  if (number) return *number * scale;
  return InvalidArgument(fmt::format(
      "--{}: '{}' is not a size from {} to {}, such as 4096, 32k or 4G", flag, text, low, kMost));
}

Result<json::Value> ParseObject(const std::string& text, const char* flag) {
  auto value = json::Parse(text);
  if (!value.ok()) {
    return InvalidArgument(fmt::format("--{}: {}", flag, value.status().message()));
  }
  if (!value->is_object()) return InvalidArgument(fmt::format("--{} expects a JSON object", flag));
  return value;
}

Status CheckNotEmpty(const FlagValues& values, const char* flag) {
  for (const std::string& value : values) {
    if (value.empty()) {
      return InvalidArgument(
          fmt::format("--{}: '' says nothing; give a value, or leave the flag out", flag));
    }
  }
  return OkStatus();
}

ApplyFlag OneOf(const std::string& flag, const FlagValues& accepted) {
  return [flag, accepted](const FlagValues& values, ServeOptions&) -> Status {
    if (std::find(accepted.begin(), accepted.end(), values[0]) != accepted.end()) return OkStatus();
    return InvalidArgument(fmt::format("--{}: {}", flag, NotAvailable(values[0], accepted)));
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

ServeFlag Refused(const std::string& name, FlagKind kind, const std::string& why) {
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
