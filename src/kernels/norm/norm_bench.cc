// Time of RMSNorm per call, its bandwidth, and that as a percentage of a plain copy of the same
// bytes in the same run. `norm_bench [cuda]`; the CPU otherwise.
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "kernels/norm/norm.h"

namespace fathom::kernels {
namespace {

constexpr int kRepeats = 200;

// Microseconds a call, after a warm-up.
template <typename Body>
double TimeUs(device::Stream& stream, const Body& body) {
  const SystemClock clock;
  body();
  CHECK(stream.Synchronize().ok());
  const TimePoint start = clock.Now();
  for (int i = 0; i < kRepeats; ++i) body();
  CHECK(stream.Synchronize().ok());
  return Seconds(clock.Now() - start) * 1e6 / kRepeats;
}

int Run(bool cuda) {
  auto device =
      cuda ? device::MakeCudaDevice(0)
           : Result<std::unique_ptr<device::Device>>(device::MakeCpuDevice(NumUsableCores()));
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", device.status().message().c_str());
    return ExitCode(device.status());
  }
  const auto stream = std::move((*device)->MakeStream().value());
  std::printf("%s\n%8s %8s %10s %10s %10s\n", (*device)->name().c_str(), "rows", "size", "us",
              "GB/s", "% of copy");
  for (const int64_t size : {512, 4096, 7168}) {
    for (const int64_t rows : {1, 64, 2048}) {
      const int64_t bytes = rows * size * static_cast<int64_t>(sizeof(BFloat16));
      const device::Buffer x = std::move((*device)->Allocate(bytes).value());
      const device::Buffer y = std::move((*device)->Allocate(bytes).value());
      const device::Buffer weight = std::move((*device)->Allocate(size * 2).value());
      const RmsNormParams<BFloat16> params{
          .x = reinterpret_cast<const BFloat16*>(x.data()),
          .weight = reinterpret_cast<const BFloat16*>(weight.data()),
          .y = reinterpret_cast<BFloat16*>(y.data()),
          .num_rows = rows,
          .size = size,
          .x_stride = size,
          .y_stride = size,
          .eps = 1e-6f};
      const double us = TimeUs(*stream, [&] { Launch(params, *stream); });
      const double copy_us =
          TimeUs(*stream, [&] { CHECK(stream->Copy(y.data(), x.data(), bytes).ok()); });
      std::printf("%8ld %8ld %10.2f %10.2f %10.1f\n", static_cast<long>(rows),
                  static_cast<long>(size), us, static_cast<double>(2 * bytes) / us / 1e3,
                  100 * copy_us / us);
    }
  }
  return 0;
}

}  // namespace
}  // namespace fathom::kernels

int main(int argc, char** argv) {
  return fathom::kernels::Run(argc > 1 && std::strcmp(argv[1], "cuda") == 0);
}
