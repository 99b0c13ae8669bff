// bench load: from nothing to an engine that takes requests, as `fathom serve` does it, beside what
// plain copies from pinned memory reach on the same links.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "apps/fathom/bench/bench.h"
#include "apps/fathom/bench/report.h"
#include "apps/fathom/local_engine.h"
#include "apps/fathom/progress.h"
#include "base/clock.h"

namespace fathom::app {
namespace {

// Bytes a second from pinned host memory to all devices at once, the best of a few copies.
Result<double> LinkSpeed(const std::vector<SessionRank>& ranks) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  constexpr int kCopies = 8;
  struct Link {
    device::Buffer host, memory;
    std::unique_ptr<device::Stream> stream;
  };
  std::vector<Link> links;
  for (const SessionRank& rank : ranks) {
    Link& link = links.emplace_back();
    ASSIGN_OR_RETURN(link.host, rank.device->AllocateHost(kBytes));
    ASSIGN_OR_RETURN(link.memory, rank.device->Allocate(kBytes));
    ASSIGN_OR_RETURN(link.stream, rank.device->MakeStream());
  }
  const SystemClock clock;
  const double bytes = static_cast<double>(kBytes) * static_cast<double>(links.size());
  double best = 0;
  for (int i = 0; i < kCopies; ++i) {
    const TimePoint begin = clock.Now();
    for (const Link& link : links) {
      RETURN_IF_ERROR(link.stream->Copy(link.memory.data(), link.host.data(), kBytes));
    }
    for (const Link& link : links) RETURN_IF_ERROR(link.stream->Synchronize());
    best = std::max(best, bytes / Seconds(clock.Now() - begin));
  }
  return best;
}

json::Value ToJson(const LoadTimes& times, double link, double ready_seconds) {
  json::Value out = json::Value::Object();
  out.Set("bytes", json::Value::Number(times.bytes));
  out.Set("transfer_seconds", json::Value::Number(times.transfer_seconds));
  out.Set("ready_seconds", json::Value::Number(ready_seconds));
  if (link > 0) out.Set("link_bytes_per_second", json::Value::Number(link));
  return out;
}

}  // namespace

Status RunBenchLoad(const LoadBenchOptions& options) {
  const SystemClock clock;
  const TimePoint begin = clock.Now();
  ASSIGN_OR_RETURN(ModelSession session, OpenModel(options.model, SessionText::kTokensOnly));
  const bool on_gpu = session.on_gpu();
  double link = 0, link_seconds = 0;
  if (on_gpu) {  // before the KV cache takes the rest of the memory
    const TimePoint link_begin = clock.Now();
    ASSIGN_OR_RETURN(link, LinkSpeed(session.ranks));
    link_seconds = Seconds(clock.Now() - link_begin);
  }
  const LoadTimes times = session.load_times;
  ASSIGN_OR_RETURN(const auto local, LocalEngine::Start(std::move(session), options.model,
                                                        options.model.model, /*max_queue=*/1));
  const double ready = Seconds(clock.Now() - begin) - link_seconds;

  const auto bytes = static_cast<double>(times.bytes);
  const size_t num_ranks = local->session().ranks.size();
  fmt::print("{} onto {}{}\n", options.model.model,
             num_ranks > 1 ? fmt::format("{} x ", num_ranks) : "",
             local->session().device().name());
  if (times.transfer_seconds > 0) {
    const double speed = bytes / times.transfer_seconds;
    fmt::print("weights   {} in {:.3f} s, {}/s{}\n", FormatBytes(bytes), times.transfer_seconds,
               FormatBytes(speed),
               link > 0 ? fmt::format(": {} of {}/s, which plain pinned copies reach",
                                      FormatShare(speed, link), FormatBytes(link))
                        : "");
  }
  fmt::print("ready     {:.3f} s after the start, {:.3f} s of them beyond the weights\n", ready,
             ready - times.transfer_seconds);
  return WriteJson(options.output_json, ToJson(times, link, ready));
}

}  // namespace fathom::app
