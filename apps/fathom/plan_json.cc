#include <utility>

#include "apps/fathom/plan.h"
#include "json/json.h"

namespace fathom::app {
namespace {

using json::Value;

Value Integer(int64_t n) { return Value::Number(n); }

Value StageJson(const model::StageMemory& stage) {
  Value weights = Value::Object();
  for (const checkpoint::PartBytes& part : stage.weights)
    weights.Set(part.name, Integer(part.bytes));
  Value out = Value::Object();
  out.Set("weight_bytes", Integer(stage.weight_bytes));
  out.Set("weights", std::move(weights));
  out.Set("workspace_bytes", Integer(stage.workspace_bytes));
  out.Set("logits_bytes", Integer(stage.logits_bytes));
  out.Set("cuda_bytes", Integer(model::kCudaBytes));
  out.Set("kv_budget_bytes", Integer(stage.kv_budget_bytes));
  out.Set("kv_bytes", Integer(stage.kv_bytes));
  out.Set("block_bytes", Integer(stage.layout.block_bytes));
  out.Set("window_page_bytes", Integer(stage.layout.window_page_bytes));
  out.Set("state_slot_bytes", Integer(stage.layout.state.slot_bytes));
  return out;
}

Value RequestsJson(const PlanOptions& options, const PlannedLayout& layout) {
  Value out = Value::Array();
  for (const int64_t length : RequestLengths(options, layout.memory)) {
    Value entry = Value::Object();
    entry.Set("tokens", Integer(length));
    entry.Set("at_once",
              Integer(layout.parallel.data_parallel_size * layout.memory.NumRequests(length)));
    out.items().push_back(std::move(entry));
  }
  return out;
}

Value LayoutJson(const PlanOptions& options, const PlannedLayout& layout) {
  Value out = Value::Object();
  out.Set("flags", Value::String(LayoutFlags(layout.parallel)));
  out.Set("tensor_parallel_size", Integer(layout.parallel.tensor_parallel_size));
  out.Set("data_parallel_size", Integer(layout.parallel.data_parallel_size));
  out.Set("pipeline_parallel_size", Integer(layout.parallel.pipeline_parallel_size));
  out.Set("enable_expert_parallel", Value::Bool(layout.parallel.enable_expert_parallel));
  out.Set("runs_on_gpus", Value::Bool(RunsOnGpus(layout.parallel)));
  out.Set("fits", Value::Bool(layout.memory.fits()));
  out.Set("missing_bytes", Integer(layout.memory.missing_bytes));
  Value stages = Value::Array();
  for (const auto& stage : layout.memory.stages) stages.items().push_back(StageJson(stage));
  out.Set("stages", std::move(stages));
  out.Set("max_model_len", Integer(layout.memory.max_model_len));
  out.Set("tokens_held", Integer(layout.parallel.data_parallel_size * layout.memory.num_tokens()));
  out.Set("requests", RequestsJson(options, layout));
  Value speeds = Value::Object();
  for (const PlannedSpeed& speed : layout.speeds) {
    Value entry = Value::Object();
    if (speed.ms > 0) entry.Set("ms", Value::Number(speed.ms));
    entry.Set("tokens_per_s", Value::Number(speed.tokens_per_s));
    speeds.Set(speed.key, std::move(entry));
  }
  out.Set("at_best", std::move(speeds));
  return out;
}

}  // namespace

std::string PlanJson(const PlanOptions& options, const PlanReport& report) {
  Value device = Value::Object();
  device.Set("name", Value::String(report.device.name));
  device.Set("source", Value::String(report.device.source));
  device.Set("memory_bytes", Integer(static_cast<int64_t>(report.device.memory_bytes)));
  Value layouts = Value::Array();
  for (const PlannedLayout& layout : report.layouts) {
    layouts.items().push_back(LayoutJson(options, layout));
  }
  Value out = Value::Object();
  out.Set("model", Value::String(options.model));
  out.Set("device", std::move(device));
  out.Set("gpu_memory_utilization", Value::Number(options.gpu_memory_utilization));
  out.Set("layouts", std::move(layouts));
  if (report.fitting_gpus > 0) {
    out.Set("fits_on_gpus", Integer(report.fitting_gpus));
    out.Set("fits_with", Value::String(LayoutFlags(report.fitting)));
  }
  return json::Dump(out);
}

}  // namespace fathom::app
