// ProgressLine: how far a long piece of work is, on one line of stderr that is rewritten; a
// terminal only, so that logs stay clean. Any thread, one at a time.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"

namespace fathom::app {

class ProgressLine {
 public:
  explicit ProgressLine(std::string what);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void Update(int64_t done_bytes, int64_t total_bytes);

 private:
  std::string what_;
  bool is_terminal_;
  SystemClock clock_;
  TimePoint start_;
  TimePoint last_shown_;
};

// 1.50 GB, 640 KB.
std::string FormatBytes(double bytes);

}  // namespace fathom::app
