// What the bench commands print and write. Pure, but for WriteJson.
#pragma once

#include <string>
#include <vector>

#include "apps/fathom/bench/operator_profile.h"
#include "base/status.h"
#include "json/json.h"

namespace fathom::app {

// The value below which a share of 0 to 1 of them lies, by linear interpolation; 0 of none.
double Percentile(std::vector<double> values, double share);
double Mean(const std::vector<double>& values);

// {"10": …, "25": …, "50", "75", "90", "99"}, as vLLM's benchmarks have it.
json::Value Percentiles(const std::vector<double>& values);

// A table with a row for each operator and their sum.
std::string FormatOperators(const std::vector<OperatorTime>& operators);
json::Value OperatorsToJson(const std::vector<OperatorTime>& operators);

// Writes the text of `value` to the file; nothing when `path` is empty. kInvalidArgument names it.
Status WriteJson(const std::string& path, const json::Value& value);

// "75.1%", or "-" where there is no floor.
std::string FormatShare(double floor, double time);

}  // namespace fathom::app
