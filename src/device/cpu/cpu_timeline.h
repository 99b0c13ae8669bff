// The Timeline of CPU streams (device/timeline.h).
#pragma once

#include <memory>

#include "device/timeline.h"

namespace fathom::device {

std::unique_ptr<Timeline> MakeCpuTimeline();

}  // namespace fathom::device
