// The process log, to stderr: `LogInfo("loaded {} tensors", n)`. Any thread. The one adapter over
// spdlog; control bytes in a message are escaped, so that no input can forge a line.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>

namespace fathom {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Drops messages below `level`. Call once at start, before other threads run.
void SetLogLevel(LogLevel level);
void Log(LogLevel level, std::string_view message);

template <typename... Args>
void LogDebug(fmt::format_string<Args...> f, Args&&... args) {
  Log(LogLevel::kDebug, fmt::format(f, std::forward<Args>(args)...));
}
template <typename... Args>
void LogInfo(fmt::format_string<Args...> f, Args&&... args) {
  Log(LogLevel::kInfo, fmt::format(f, std::forward<Args>(args)...));
}
template <typename... Args>
void LogWarning(fmt::format_string<Args...> f, Args&&... args) {
  Log(LogLevel::kWarning, fmt::format(f, std::forward<Args>(args)...));
}
template <typename... Args>
void LogError(fmt::format_string<Args...> f, Args&&... args) {
  Log(LogLevel::kError, fmt::format(f, std::forward<Args>(args)...));
}

}  // namespace fathom
