// Time, as a value that tests can drive. Production code takes a `const Clock&`; only this header
// reads the machine's clock. Monotonic; any thread.
#pragma once

#include <chrono>

namespace fathom {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;
};

class SystemClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
};

// Moves only when told. One thread.
class VirtualClock final : public Clock {
 public:
  TimePoint Now() const override { return now_; }
  void Advance(Duration by) { now_ += by; }

 private:
  TimePoint now_{};
};

inline double Seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace fathom
