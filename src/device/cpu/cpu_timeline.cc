#include "device/cpu/cpu_timeline.h"

#include "base/clock.h"

namespace fathom::device {
namespace {

class CpuTimeline final : public Timeline {
 public:
  void Mark(Stream&) override { marks_.push_back(clock_.Now()); }
  void Delay(Stream&, int) override {}
  Result<std::vector<double>> Take() override {
    std::vector<double> times;
    for (size_t i = 1; i < marks_.size(); ++i) {
      times.push_back(Seconds(marks_[i] - marks_[i - 1]) * 1e6);
    }
    marks_.clear();
    return times;
  }

 private:
  const SystemClock clock_{};
  std::vector<TimePoint> marks_;
};

}  // namespace

std::unique_ptr<Timeline> MakeCpuTimeline() { return std::make_unique<CpuTimeline>(); }

}  // namespace fathom::device
