// What the rows of the flag table (serve_flags.h) are made of: values parsed and checked, with one
// text for each kind of mistake. Pure.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/fathom/serve_flags.h"

namespace fathom::app {

using FlagValues = std::vector<std::string>;
using ApplyFlag = std::function<Status(const FlagValues&, ServeOptions&)>;

// Of a whole text from `low` to `high`.
template <typename T>
std::optional<T> ToNumber(const std::string& text, T low, T high) {
  T out{};
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, out);
  const bool is_number = error == std::errc() && stopped == end && out >= low && out <= high;
  return is_number ? std::optional(out) : std::nullopt;
}
template <typename T>
std::string NotANumber(const std::string& text, T low, T high) {
  return fmt::format("'{}' is not a number from {} to {}", text, low, high);
}

template <typename T>
Result<T> ParseNumber(const std::string& text, T low, T high, const char* flag) {
  if (const auto number = ToNumber(text, low, high)) return *number;
  return InvalidArgument(fmt::format("--{}: {}", flag, NotANumber(text, low, high)));
}

// Values by their names, in a table that stays.
template <typename T>
using Choices = std::span<const std::pair<std::string_view, T>>;

inline constexpr std::pair<std::string_view, DeviceChoice> kDevices[] = {
    {"auto", DeviceChoice::kAuto}, {"cpu", DeviceChoice::kCpu}, {"cuda", DeviceChoice::kCuda}};
inline constexpr std::pair<std::string_view, config::Numerics> kNumerics[] = {
    {"official", config::Numerics::kOfficial}, {"fp32", config::Numerics::kFp32}};

template <typename T>
FlagValues NamesOf(Choices<T> choices) {
  FlagValues names;
  for (const auto& choice : choices) names.emplace_back(choice.first);
  return names;
}
// "'x' is not available; use a or b".
std::string NotAvailable(const std::string& text, const FlagValues& known);

template <typename T>
std::optional<T> ToChoice(std::string_view text, Choices<T> choices) {
  for (const auto& [name, value] : choices) {
    if (name == text) return value;
  }
  return std::nullopt;
}

// Bytes or tokens, at least `low`, with an optional suffix: 1024, 32k, 1M, 4G (binary for k, M, G;
// vLLM reads them so too).
Result<int64_t> ParseSize(const std::string& text, const char* flag, int64_t low = 1);

Result<json::Value> ParseObject(const std::string& text, const char* flag);

template <typename T>
ApplyFlag SetNumber(T ServeOptions::* member, T low, T high, const char* flag) {
  return [=](const FlagValues& values, ServeOptions& options) -> Status {
    ASSIGN_OR_RETURN(options.*member, ParseNumber<T>(values[0], low, high, flag));
    return OkStatus();
  };
}

// Every value says something: a shell's variable that is not set is an empty one.
Status CheckNotEmpty(const FlagValues& values, const char* flag);

// Takes one of the given values and does nothing with it.
ApplyFlag OneOf(const std::string& flag, const FlagValues& accepted);

ServeFlag Works(std::string name, std::string value_name, std::string help, ApplyFlag apply,
                FlagKind kind = FlagKind::kValue);
ServeFlag NoEffect(std::string name, FlagKind kind, std::string why, ApplyFlag apply = nullptr,
                   bool negatable = false);
ServeFlag Refused(const std::string& name, FlagKind kind, const std::string& why);

// The rows about listening, keys, limits and liveness (api_flags.cc).
void AddApiFlags(std::vector<ServeFlag>* flags);
// The rows about the KV cache (kv_flags.cc).
void AddKvFlags(std::vector<ServeFlag>* flags);
// The rows about several devices and several hosts (parallel_flags.cc).
void AddParallelFlags(std::vector<ServeFlag>* flags);

}  // namespace fathom::app
