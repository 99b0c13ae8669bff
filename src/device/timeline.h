// Timeline: marks between pieces of a stream's work, and the time from one to the next as the
// device saw it. One thread, one stream at a time; the device outlives it.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "device/device.h"

namespace fathom::device {

class Timeline {
 public:
  virtual ~Timeline() = default;
  // In stream order.
  virtual void Mark(Stream& stream) = 0;
  // Keeps a GPU's stream busy meanwhile, so that what is enqueued next does not wait for the host.
  virtual void Delay(Stream& stream, int microseconds) = 0;
  // Waits for the marks and forgets them: microseconds from each to the next. kDevice.
  virtual Result<std::vector<double>> Take() = 0;
};

// For streams of this kind. A CPU stream runs its work inline, so there a mark is the clock's time.
std::unique_ptr<Timeline> MakeTimeline(DeviceKind kind);

}  // namespace fathom::device
