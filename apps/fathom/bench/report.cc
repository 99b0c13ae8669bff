#include "apps/fathom/bench/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>

namespace fathom::app {

double Percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  return std::lerp(values[below], values[above], place - static_cast<double>(below));
}

double Mean(const std::vector<double>& values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

json::Value Percentiles(const std::vector<double>& values) {
  json::Value out = json::Value::Object();
  for (const int percent : {10, 25, 50, 75, 90, 99}) {
    out.Set(std::to_string(percent), json::Value::Number(Percentile(values, percent / 100.0)));
  }
  return out;
}

std::string FormatShare(double floor, double time) {
  return floor > 0 && time > 0 ? fmt::format("{:.1f}%", 100 * floor / time) : "-";
}

std::string FormatOperators(const std::vector<OperatorTime>& operators) {
  std::string out =
      fmt::format("  {:<24} {:<10} {:>5} {:>10} {:>10} {:>10} {:>7} {:>9} {:>9}\n", "operator",
                  "layers", "count", "us each", "us", "floor us", "share", "GB/s", "TFLOP/s");
  OperatorTime sum{.name = "sum"};
  const auto add_row = [&out](const OperatorTime& op) {
    fmt::format_to(std::back_inserter(out),
                   "  {:<24} {:<10} {:>5} {:>10.1f} {:>10.1f} {:>10.1f} {:>7} {:>9.0f} {:>9.1f}\n",
                   op.name, op.layer_kind, op.count, op.us / std::max(1, op.count), op.us,
                   op.floor_us, FormatShare(op.floor_us, op.us),
                   op.us > 0 ? op.bytes / op.us / 1e3 : 0, op.us > 0 ? op.flops / op.us / 1e6 : 0);
  };
  for (const OperatorTime& op : operators) {
    add_row(op);
    sum.count += op.count;
    sum.us += op.us;
    sum.floor_us += op.floor_us;
    sum.bytes += op.bytes;
    sum.flops += op.flops;
  }
  add_row(sum);
  return out;
}

json::Value OperatorsToJson(const std::vector<OperatorTime>& operators) {
  json::Value out = json::Value::Array();
  for (const OperatorTime& op : operators) {
    json::Value row = json::Value::Object({{"operator", json::Value::String(op.name)}});
    if (!op.layer_kind.empty()) row.Set("layers", json::Value::String(op.layer_kind));
    row.Set("count", json::Value::Number(int64_t{op.count}));
    row.Set("us", json::Value::Number(op.us));
    row.Set("floor_us", json::Value::Number(op.floor_us));
    row.Set("bytes", json::Value::Number(op.bytes));
    row.Set("flops", json::Value::Number(op.flops));
    out.items().push_back(std::move(row));
  }
  return out;
}

Status WriteJson(const std::string& path, const json::Value& value) {
  if (path.empty()) return OkStatus();
  std::ofstream file(path, std::ios::binary);
  file << json::DumpPython(value) << '\n';
  file.close();
  if (file) return OkStatus();
  return InvalidArgument(fmt::format("--output-json: cannot write {}", path));
}

}  // namespace fathom::app
