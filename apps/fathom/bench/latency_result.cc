#include "apps/fathom/bench/latency_result.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "apps/fathom/bench/report.h"

namespace fathom::app {
namespace {

void PrintSteps(const char* what, const StepTimes& times, double tokens) {
  if (times.seconds.empty()) return;
  const double median = Percentile(times.seconds, 0.5);
  fmt::print("  {:<8} {:>9.3f} ms (p10 {:.3f}, p90 {:.3f}), {:.0f} tokens/s", what, median * 1e3,
             Percentile(times.seconds, 0.1) * 1e3, Percentile(times.seconds, 0.9) * 1e3,
             tokens / median);
  if (times.floor_us > 0) {
    fmt::print("; floor {:.3f} ms: {}", times.floor_us / 1e3,
               FormatShare(times.floor_us, median * 1e6));
  }
  fmt::print("; {:.2f} GB, {:.2f} TFLOP, {:.1f} experts a layer\n", times.bytes / 1e9,
             times.flops / 1e12, times.experts);
}

json::Value ToJson(const StepTimes& times) {
  json::Value out = json::Value::Object();
  out.Set("median_ms", json::Value::Number(Percentile(times.seconds, 0.5) * 1e3));
  out.Set("mean_ms", json::Value::Number(Mean(times.seconds) * 1e3));
  out.Set("p90_ms", json::Value::Number(Percentile(times.seconds, 0.9) * 1e3));
  out.Set("bytes", json::Value::Number(times.bytes));
  out.Set("flops", json::Value::Number(times.flops));
  out.Set("experts_per_layer", json::Value::Number(times.experts));
  if (times.floor_us > 0) {
    out.Set("floor_ms", json::Value::Number(times.floor_us / 1e3));
    out.Set("share_of_roofline",
            json::Value::Number(times.floor_us / 1e6 / Percentile(times.seconds, 0.5)));
  }
  return out;
}

}  // namespace

void PrintCase(const CaseResult& r) {
  const Case& c = r.of;
  fmt::print("batch {}, {} tokens in{}\n", c.batch_size, c.input_len,
             c.prefill_len < c.input_len
                 ? fmt::format(" ({} of them taken as cached)", c.input_len - c.prefill_len)
                 : "");
  PrintSteps("prefill", r.prefill, static_cast<double>(c.batch_size * c.prefill_len));
  PrintSteps("decode", r.decode, c.batch_size);
  if (r.decode_device_us > 0) {
    const double wall_us = Percentile(r.decode.seconds, 0.5) * 1e6;
    fmt::print(
        "  on the device {:.3f} ms a decode step; a host that waits for each adds {:.1f} us\n",
        r.decode_device_us / 1e3, std::max(0.0, wall_us - r.decode_device_us));
  }
  fmt::print("  latency  {:>9.3f} ms\n", Mean(r.latencies) * 1e3);
  for (const auto& [what, operators] : {std::pair{"prefill (last chunk)", &r.prefill_operators},
                                        std::pair{"decode", &r.decode_operators}}) {
    if (operators->empty()) continue;
    fmt::print("  {}, each operator alone:\n{}", what, FormatOperators(*operators));
  }
  if (!r.decode_operators.empty()) {
    double alone_us = 0;
    for (const OperatorTime& op : r.decode_operators) alone_us += op.us;
    fmt::print("  {:.3f} ms one after the other, {:.3f} ms as a step: {:.3f} ms are overlap\n",
               alone_us / 1e3, r.decode_device_us / 1e3, (alone_us - r.decode_device_us) / 1e3);
  }
  std::fflush(stdout);
}

json::Value ToJson(const CaseResult& r, int output_len) {
  json::Value out = json::Value::Object();
  out.Set("batch_size", json::Value::Number(int64_t{r.of.batch_size}));
  out.Set("input_len", json::Value::Number(r.of.input_len));
  out.Set("prefill_len", json::Value::Number(r.of.prefill_len));
  out.Set("output_len", json::Value::Number(int64_t{output_len}));
  out.Set("avg_latency", json::Value::Number(Mean(r.latencies)));
  std::vector<json::Value> latencies;
  for (const double s : r.latencies) latencies.push_back(json::Value::Number(s));
  out.Set("latencies", json::Value::Array(std::move(latencies)));
  out.Set("percentiles", Percentiles(r.latencies));
  if (!r.prefill.seconds.empty()) out.Set("prefill", ToJson(r.prefill));
  if (!r.decode.seconds.empty()) out.Set("decode", ToJson(r.decode));
  if (r.decode_device_us > 0) {
    out.Find("decode")->Set("device_ms", json::Value::Number(r.decode_device_us / 1e3));
  }
  if (!r.prefill_operators.empty()) {
    out.Set("prefill_operators", OperatorsToJson(r.prefill_operators));
  }
  if (!r.decode_operators.empty()) {
    out.Set("decode_operators", OperatorsToJson(r.decode_operators));
  }
  return out;
}

}  // namespace fathom::app
