// bench latency and bench kernels: batches of equal prompts, from their first chunk to their last
// token, on the model alone: no scheduler, no sampling. A step's share is that of its roofline
// (model/roofline.h) with the experts that it chose.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "apps/fathom/bench/bench.h"
#include "apps/fathom/bench/latency_result.h"
#include "apps/fathom/bench/operator_profile.h"
#include "apps/fathom/bench/report.h"
#include "apps/fathom/bench/step_bench.h"
#include "apps/fathom/model_session.h"
#include "base/clock.h"

namespace fathom::app {
namespace {

// A step of a batch's prompts.
struct Chunk {
  model::StepShape shape;
  int first_seq = 0;
};

std::vector<Case> MakeCases(const StepBenchOptions& options) {
  std::vector<Case> cases;
  for (const int64_t input_len : options.input_lens) {
    for (const int batch_size : options.batch_sizes) {
      cases.push_back(
          {batch_size, input_len, std::min(input_len, options.prefill_len.value_or(input_len))});
    }
  }
  return cases;
}

// Prompts in order, as many tokens a step as each data rank may have. Every step has equal parts.
std::vector<Chunk> PrefillChunks(const Case& c, int max_tokens, int num_data_ranks) {
  std::vector<Chunk> chunks;
  const int64_t cached = c.input_len - c.prefill_len;
  const auto seqs_per_step =
      static_cast<int>(std::max<int64_t>(1, max_tokens / std::max<int64_t>(1, c.prefill_len))) *
      num_data_ranks;
  for (int seq = 0; seq < c.batch_size && c.prefill_len > 0; seq += seqs_per_step) {
    const int seqs = std::min(seqs_per_step, c.batch_size - seq);
    for (int64_t done = 0; done < c.prefill_len; done += max_tokens) {
      const auto tokens = static_cast<int>(std::min<int64_t>(max_tokens, c.prefill_len - done));
      chunks.push_back({{.num_seqs = seqs,
                         .tokens_per_seq = tokens,
                         .context_tokens = cached + done,
                         .logits_rows = seqs},
                        seq});
    }
  }
  return chunks;
}

model::StepShape DecodeShape(const Case& c, int64_t step) {
  return {.num_seqs = c.batch_size,
          .tokens_per_seq = 1,
          .context_tokens = c.input_len + step,
          .logits_rows = c.batch_size};
}

class CaseBench {
 public:
  CaseBench(StepBench& bench, const StepBenchOptions& options, const Case& c)
      : bench_(bench),
        options_(options),
        chunks_(PrefillChunks(c, bench.session().limits.max_batched_tokens,
                              bench.session().parallel.data_parallel_size)),
        num_decodes_(options.output_len - (chunks_.empty() ? 0 : 1)) {
    result_.of = c;
  }

  Result<CaseResult> Run(bool merge_layer_kinds) {
    RETURN_IF_ERROR(CountExperts());
    for (int i = -options_.num_iters_warmup; i < options_.num_iters; ++i) {
      RETURN_IF_ERROR(Iterate(i >= 0));
    }
    if (!on_gpu()) return std::move(result_);
    // Of stages, steps that follow each other would overlap.
    const bool is_staged = bench_.session().parallel.pipeline_parallel_size > 1;
    if (num_decodes_ > 0 && !is_staged) {
      ASSIGN_OR_RETURN(
          result_.decode_device_us,
          DecodeDeviceUs(bench_, result_.of.batch_size, result_.of.input_len + num_decodes_ / 2));
    }
    if (options_.profile) RETURN_IF_ERROR(Profile(merge_layer_kinds));
    return std::move(result_);
  }

 private:
  bool on_gpu() const { return bench_.session().on_gpu(); }

  // To where the case begins.
  Status Rewind() { return bench_.Rewind(result_.of.input_len - result_.of.prefill_len); }

  // Runs every step of the case once, and prices it with the experts that it chose.
  Status CountExperts() {
    RETURN_IF_ERROR(Rewind());
    for (const Chunk& chunk : chunks_) {
      ASSIGN_OR_RETURN(prefill_experts_, bench_.CountExperts(chunk.shape, chunk.first_seq));
      AddPrice(chunk.shape, prefill_experts_, 1.0, result_.prefill);
    }
    if (num_decodes_ == 0) return OkStatus();
    ASSIGN_OR_RETURN(decode_experts_, bench_.CountExperts(DecodeShape(result_.of, 0)));
    AddPrice(DecodeShape(result_.of, num_decodes_ / 2), decode_experts_, 1.0, result_.decode);
    return OkStatus();
  }

  void AddPrice(model::StepShape shape, const ExpertCounts& experts, double steps,
                StepTimes& times) const {
    shape.distinct_experts = MeanExperts(experts);
    times.experts = shape.distinct_experts;
    const ModelSession& session = bench_.session();
    const auto costs = CostsOfRank(session, session.config, bench_.layout(), shape);
    for (const model::ProductCost& cost : costs) {
      times.bytes += (cost.weight_bytes + cost.kv_bytes) * steps;
      times.flops += cost.flops * steps;
    }
    const model::DeviceCeilings& ceilings = model::H200Ceilings();
    if (session.device().name().find(ceilings.name) == std::string::npos) return;
    times.floor_us += model::Price(costs, ceilings).floor_us() * steps;
  }

  Result<double> TimeStep(const model::StepShape& shape, int first_seq) {
    bench_.Prepare(shape, first_seq);
    const TimePoint begin = clock_.Now();
    RETURN_IF_ERROR(bench_.Forward());
    RETURN_IF_ERROR(bench_.Synchronize());
    return Seconds(clock_.Now() - begin);
  }

  Status Iterate(bool keep) {
    RETURN_IF_ERROR(Rewind());
    double prefill = 0, decode = 0;
    for (const Chunk& chunk : chunks_) {
      ASSIGN_OR_RETURN(const double seconds, TimeStep(chunk.shape, chunk.first_seq));
      prefill += seconds;
    }
    for (int step = 0; step < num_decodes_; ++step) {
      ASSIGN_OR_RETURN(const double seconds, TimeStep(DecodeShape(result_.of, step), 0));
      decode += seconds;
      if (keep) result_.decode.seconds.push_back(seconds);
    }
    if (!keep) return OkStatus();
    if (!chunks_.empty()) result_.prefill.seconds.push_back(prefill);
    result_.latencies.push_back(prefill + decode);
    return OkStatus();
  }

  Status Profile(bool merge_layer_kinds) {
    constexpr int kRepeats = 5;
    if (!chunks_.empty()) {
      ASSIGN_OR_RETURN(result_.prefill_operators,
                       ProfileOperators(bench_, chunks_.back().shape, prefill_experts_, kRepeats));
    }
    if (num_decodes_ > 0) {
      // One that completes no entries, as three of four.
      model::StepShape shape = DecodeShape(result_.of, num_decodes_ / 2);
      shape.context_tokens = shape.context_tokens / 4 * 4;
      RETURN_IF_ERROR(bench_.Rewind(shape.context_tokens));
      ASSIGN_OR_RETURN(result_.decode_operators,
                       ProfileOperators(bench_, shape, decode_experts_, kRepeats));
    }
    if (!merge_layer_kinds) return OkStatus();
    result_.prefill_operators = MergeLayerKinds(result_.prefill_operators);
    result_.decode_operators = MergeLayerKinds(result_.decode_operators);
    return OkStatus();
  }

  StepBench& bench_;
  const StepBenchOptions& options_;
  const std::vector<Chunk> chunks_;
  const int num_decodes_;
  const SystemClock clock_;
  CaseResult result_;
  ExpertCounts prefill_experts_;  // of the last chunk
  ExpertCounts decode_experts_;
};

// Only tensor ranks with a part of each expert run the same with and without others: ranks with
// whole experts run the tokens that others send, stages wait for the one before.
Status CheckOnlyRank(const ModelOptions& model) {
  if (!model.only_rank) return OkStatus();
  const int size = model.parallel.tensor_parallel_size;
  if (size == 1 || model.parallel.world_size() != size || model.parallel.enable_expert_parallel) {
    return InvalidArgument(
        "--only-rank goes with --tensor-parallel-size of 2 or more, without data ranks, stages and "
        "--enable-expert-parallel");
  }
  if (*model.only_rank >= size) {
    return InvalidArgument(
        fmt::format("--only-rank {}: --tensor-parallel-size {} has ranks 0 to {}", *model.only_rank,
                    size, size - 1));
  }
  if (model.device == DeviceChoice::kCpu) {
    return InvalidArgument("--only-rank runs on a GPU: not with --device cpu");
  }
  return OkStatus();
}

Status Check(const StepBenchOptions& options) {
  if (options.output_len == 0 && options.prefill_len == 0) {
    return InvalidArgument("--output-len 0 with --prefill-len 0 leaves nothing to run");
  }
  if (options.profile && options.model.device == DeviceChoice::kCpu) {
    return InvalidArgument("operators are timed on a GPU only: not with --device cpu");
  }
  return CheckOnlyRank(options.model);
}

// Limits that the cases need and no more: what the workspace does not take, the KV cache may.
Result<ModelSession> Open(const StepBenchOptions& options, const std::vector<Case>& cases) {
  ModelOptions model = options.model;
  int64_t most_tokens = 1;
  model.max_num_seqs = 1;
  const int data_ranks = model.parallel.data_parallel_size;
  for (const Case& c : cases) {
    const int seqs = (c.batch_size + data_ranks - 1) / data_ranks;
    model.max_num_seqs = std::max(model.max_num_seqs, seqs);
    model.max_model_len = std::max(model.max_model_len, c.input_len + options.output_len);
    most_tokens = std::max(most_tokens, seqs * c.prefill_len);
  }
  model.max_num_batched_tokens =
      static_cast<int>(std::min<int64_t>(model.max_num_batched_tokens, most_tokens));
  return OpenModel(model, SessionText::kTokensOnly);
}

Status RunCases(const StepBenchOptions& options, bool merge_layer_kinds) {
  RETURN_IF_ERROR(Check(options));
  const std::vector<Case> cases = MakeCases(options);
  ASSIGN_OR_RETURN(const ModelSession session, Open(options, cases));
  if (options.profile && !session.on_gpu()) {
    return InvalidArgument("operators are timed on a GPU only; this is " + session.device().name());
  }
  const size_t num_ranks = session.ranks.size();
  const std::optional<int>& only_rank = options.model.only_rank;
  fmt::print("{}, {} layers{}, on {}{}\n", options.model.model, session.config.num_layers,
             only_rank ? fmt::format(", rank {} of {} without the others", *only_rank,
                                     session.parallel.tensor_parallel_size)
                       : "",
             num_ranks > 1 ? fmt::format("{} x ", num_ranks) : "", session.device().name());
  json::Value results = json::Value::Array();
  for (const Case& c : cases) {
    ASSIGN_OR_RETURN(const auto bench,
                     StepBench::Make(session, c.batch_size, c.input_len + options.output_len));
    ASSIGN_OR_RETURN(const CaseResult result, CaseBench(*bench, options, c).Run(merge_layer_kinds));
    PrintCase(result);
    results.items().push_back(ToJson(result, options.output_len));
  }
  json::Value out = json::Value::Object();
  out.Set("model", json::Value::String(options.model.model));
  out.Set("num_hidden_layers", json::Value::Number(int64_t{session.config.num_layers}));
  out.Set("num_devices", json::Value::Number(static_cast<int64_t>(num_ranks)));
  if (only_rank) out.Set("only_rank", json::Value::Number(int64_t{*only_rank}));
  out.Set("device", json::Value::String(session.device().name()));
  out.Set("cases", std::move(results));
  return WriteJson(options.output_json, out);
}

}  // namespace

Status RunBenchLatency(const StepBenchOptions& options) { return RunCases(options, true); }

Status RunBenchKernels(const StepBenchOptions& options) {
  StepBenchOptions kernels = options;
  kernels.profile = true;
  return RunCases(kernels, false);
}

}  // namespace fathom::app
