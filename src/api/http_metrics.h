// Counts and times of HTTP exchanges, under the names that dashboards of the field use. Any thread.
#pragma once

#include "base/metrics.h"
#include "http/server.h"

namespace fathom::api {

// http_requests_total{handler,method,status} and http_request_duration_seconds{handler,method}. The
// labels take few values: routes, known methods, classes of status.
void RecordExchange(const http::ExchangeRecord& record, MetricsRegistry* metrics);

}  // namespace fathom::api
