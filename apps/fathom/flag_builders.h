// What the rows of the flag table (serve_flags.h) are made of: values parsed and checked, with one
// text for each kind of mistake. Pure.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <vector>

#include "apps/fathom/serve_flags.h"

namespace fathom::app {

using FlagValues = std::vector<std::string>;
using ApplyFlag = std::function<Status(const FlagValues&, ServeOptions&)>;

Status NotANumber(const char* flag, const std::string& text, const std::string& low,
                  const std::string& high);

template <typename T>
Result<T> ParseNumber(const std::string& text, T low, T high, const char* flag) {
  T out{};
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, out);
  if (error != std::errc() || stopped != end || out < low || out > high) {
    return NotANumber(flag, text, std::to_string(low), std::to_string(high));
  }
  return out;
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

// Takes one of the given values and does nothing with it.
ApplyFlag OneOf(std::string flag, FlagValues accepted);

ServeFlag Works(std::string name, std::string value_name, std::string help, ApplyFlag apply,
                FlagKind kind = FlagKind::kValue);
ServeFlag NoEffect(std::string name, FlagKind kind, std::string why, ApplyFlag apply = nullptr,
                   bool negatable = false);
ServeFlag Refused(std::string name, FlagKind kind, std::string why);

// The rows about listening, keys, limits and liveness (api_flags.cc).
void AddApiFlags(std::vector<ServeFlag>* flags);
// The rows about the KV cache (kv_flags.cc).
void AddKvFlags(std::vector<ServeFlag>* flags);
// The rows about several devices and several hosts (parallel_flags.cc).
void AddParallelFlags(std::vector<ServeFlag>* flags);

}  // namespace fathom::app
