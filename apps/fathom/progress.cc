#include "apps/fathom/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace fathom::app {

ProgressLine::ProgressLine(std::string what)
    : what_(std::move(what)), is_terminal_(isatty(STDERR_FILENO) == 1), start_(clock_.Now()) {}

ProgressLine::~ProgressLine() {
  if (is_terminal_ && last_shown_ != TimePoint()) fmt::print(stderr, "\n");
}

void ProgressLine::Update(int64_t done_bytes, int64_t total_bytes) {
  if (!is_terminal_ || total_bytes == 0) return;
  const TimePoint now = clock_.Now();
  if (done_bytes < total_bytes && Seconds(now - last_shown_) < 0.1) return;
  last_shown_ = now;
  const double seconds = Seconds(now - start_);
  fmt::print(stderr, "\r{}: {} of {} ({:.0f}%), {}/s ", what_,
             FormatBytes(static_cast<double>(done_bytes)),
             FormatBytes(static_cast<double>(total_bytes)),
             100.0 * static_cast<double>(done_bytes) / static_cast<double>(total_bytes),
             FormatBytes(seconds > 0 ? static_cast<double>(done_bytes) / seconds : 0));
  std::fflush(stderr);
}

std::string FormatBytes(double bytes) {
  const char* units[] = {"B", "KB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < std::size(units)) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, units[unit]);
}

}  // namespace fathom::app
