#include "api/http_metrics.h"

#include <array>
#include <string>

namespace fathom::api {
namespace {

std::string MethodLabel(std::string_view method) {
  static constexpr std::array<std::string_view, 4> kKnown = {"GET", "POST", "HEAD", "OPTIONS"};
  for (const std::string_view known : kKnown) {
    if (method == known) return std::string(method);
  }
  return "other";
}

}  // namespace

void RecordExchange(const http::ExchangeRecord& record, MetricsRegistry* metrics) {
  const std::string handler = record.route.empty() ? "none" : std::string(record.route);
  const std::string method = MethodLabel(record.method);
  const std::string status = std::to_string(record.status / 100) + "xx";
  metrics
      ->AddCounter("http_requests", "HTTP requests by route, method and class of status",
                   {{"handler", handler}, {"method", method}, {"status", status}})
      .Increment();
  metrics
      ->AddHistogram("http_request_duration_seconds",
                     "From the complete header to the last byte of the answer",
                     {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300},
                     {{"handler", handler}, {"method", method}})
      .Observe(record.seconds);
}

}  // namespace fathom::api
