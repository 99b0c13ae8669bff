#include "apps/fathom/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "apps/fathom/flag_builders.h"
#include "apps/fathom/rank_loader.h"

namespace fathom::app {
namespace {

using config::ParallelConfig;
using model::LayoutRoofline;
using model::MemoryPlan;
using model::StageMemory;

constexpr double kGibibyte = 1 << 30;
constexpr int kMostGpus = 64;

bool HasLayout(const PlanOptions& options) {
  return options.parallel.world_size() > 1 || options.parallel.enable_expert_parallel;
}

Status CheckOptions(const PlanOptions& options) {
  const int world = options.parallel.world_size();
  if (options.num_gpus > 0 && HasLayout(options) && options.num_gpus != world) {
    return InvalidArgument(
        fmt::format("--gpus {} does not go with a layout of {} GPUs ({}): leave one of them out",
                    options.num_gpus, world, LayoutFlags(options.parallel)));
  }
  if (options.max_num_batched_tokens < options.max_num_seqs) {
    return InvalidArgument(fmt::format(
        "--max-num-batched-tokens is {}: it must be at least --max-num-seqs, which is {}",
        options.max_num_batched_tokens, options.max_num_seqs));
  }
  return OkStatus();
}

Result<model::DeviceCeilings> FindDevice(const PlanOptions& options) {
  model::DeviceCeilings device = *model::FindDevice(options.gpu);  // the flag knows no other
  if (options.gpu_memory_gib > 0) device.memory_bytes = options.gpu_memory_gib * kGibibyte;
  return device;
}

// Plans layouts of one model on one kind of GPU.
class Planner {
 public:
  static Result<Planner> Make(const PlanOptions& options, const config::ModelConfig& config,
                              const model::DeviceCeilings& device) {
    model::MemoryDemand demand;
    demand.memory_bytes = device.memory_bytes;
    demand.utilization = options.gpu_memory_utilization;
    demand.auto_model_len = options.max_model_len == "auto";
    demand.prefix_cache = options.prefix_caching;
    demand.limits = {.max_batched_tokens = options.max_num_batched_tokens,
                     .max_num_seqs = options.max_num_seqs,
                     .max_model_len = config.max_position_embeddings};
    if (!demand.auto_model_len) {
      ASSIGN_OR_RETURN(demand.limits.max_model_len,
                       ParseSize(options.max_model_len, "max-model-len"));
      if (demand.limits.max_model_len > config.max_position_embeddings) {
        return InvalidArgument(fmt::format("--max-model-len {} is more than the model's {}",
                                           demand.limits.max_model_len,
                                           config.max_position_embeddings));
      }
    }
    return Planner(options, config, device, demand);
  }

  Result<PlannedLayout> Plan(const ParallelConfig& parallel) const {
    PlannedLayout layout;
    layout.parallel = parallel;
    ASSIGN_OR_RETURN(layout.memory, PlanMemory(config_, summary_, parallel, demand_));
    ASSIGN_OR_RETURN(const LayoutRoofline roofline,
                     LayoutRoofline::Make(config_, parallel, demand_.index_dtype));
    layout.single_stream_ms = roofline.DecodeUs(1, 4096, device_) / 1000;
    const int64_t most = parallel.data_parallel_size *
                         layout.memory.NumRequests(options_.input_len + options_.output_len);
    layout.num_streams = static_cast<int>(std::min<int64_t>(options_.num_streams, most));
    if (layout.num_streams > 0) {
      layout.output_tokens_per_s = roofline.OutputTokensPerSecond(
          {layout.num_streams, options_.input_len, options_.output_len}, device_);
    }
    AddSpeeds(roofline, &layout);
    return layout;
  }

  // Those that the model can be split by.
  std::vector<PlannedLayout> PlanAll(int num_gpus) const {
    std::vector<PlannedLayout> layouts;
    for (const ParallelConfig& parallel : model::CandidateLayouts(num_gpus)) {
      Result<PlannedLayout> layout = Plan(parallel);
      if (layout.ok()) layouts.push_back(*std::move(layout));
    }
    return layouts;
  }

 private:
  Planner(const PlanOptions& options, const config::ModelConfig& config,
          const model::DeviceCeilings& device, const model::MemoryDemand& demand)
      : options_(options), config_(config), device_(device), demand_(demand), summary_(config) {}

  void AddSpeeds(const LayoutRoofline& roofline, PlannedLayout* layout) const {
    const int64_t longest = layout->memory.max_model_len;
    const auto decode = [&](int streams, int64_t context) {
      const double ms = roofline.DecodeUs(streams, context, device_) / 1000;
      layout->speeds.push_back({fmt::format("decode, {} stream{} at {} tokens", streams,
                                            streams == 1 ? "" : "s", context),
                                fmt::format("decode_{}_at_{}", streams, context), ms,
                                streams / ms * 1000});
    };
    for (const int64_t context : {int64_t{4096}, int64_t{262144}}) {
      if (context < longest) decode(1, context);
    }
    if (layout->num_streams > 0) {
      decode(layout->num_streams, options_.input_len + options_.output_len / 2);
      layout->speeds.push_back({fmt::format("{} streams of {} in, {} out", layout->num_streams,
                                            options_.input_len, options_.output_len),
                                "output", 0, layout->output_tokens_per_s});
    }
    for (const int64_t prompt : {int64_t{2048}, int64_t{32768}}) {
      if (prompt >= longest) continue;
      const double ms = roofline.PrefillUs(prompt, options_.max_num_batched_tokens, device_) / 1000;
      layout->speeds.push_back({fmt::format("prefill, {} tokens", prompt),
                                fmt::format("prefill_{}", prompt), ms,
                                static_cast<double>(prompt) / ms * 1000});
    }
  }

  PlanOptions options_;
  config::ModelConfig config_;
  model::DeviceCeilings device_;
  model::MemoryDemand demand_;
  checkpoint::ShardSummary summary_;
};

bool AnyFits(const std::vector<PlannedLayout>& layouts) {
  return std::any_of(layouts.begin(), layouts.end(),
                     [](const PlannedLayout& layout) { return layout.memory.fits(); });
}

// Best first; those that do not fit last, the one with least missing before others.
void SortForOneStream(std::vector<PlannedLayout>* layouts) {
  std::stable_sort(layouts->begin(), layouts->end(),
                   [](const PlannedLayout& a, const PlannedLayout& b) {
                     const auto key = [](const PlannedLayout& l) {
                       return std::pair(l.memory.missing_bytes, l.single_stream_ms);
                     };
                     return key(a) < key(b);
                   });
}

// Those that fit and run, in the order given.
std::vector<const PlannedLayout*> Usable(const std::vector<PlannedLayout>& layouts) {
  std::vector<const PlannedLayout*> usable;
  for (const PlannedLayout& layout : layouts) {
    if (layout.memory.fits() && RunsOnGpus(layout.parallel)) usable.push_back(&layout);
  }
  return usable;
}

Result<PlanReport> MakeReport(const PlanOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  PlanReport report;
  ASSIGN_OR_RETURN(report.config, FindModelConfig(options.model, options.layers));
  ASSIGN_OR_RETURN(report.device, FindDevice(options));
  ASSIGN_OR_RETURN(const Planner planner, Planner::Make(options, report.config, report.device));
  if (options.num_gpus > 0 && !HasLayout(options)) {
    report.layouts = planner.PlanAll(options.num_gpus);
    if (report.layouts.empty()) {
      return InvalidArgument(fmt::format("--gpus {}: {} cannot be split so far; use fewer",
                                         options.num_gpus, options.model));
    }
    SortForOneStream(&report.layouts);
  } else {
    ASSIGN_OR_RETURN(PlannedLayout layout, planner.Plan(options.parallel));
    report.layouts.push_back(std::move(layout));
  }
  const int used = report.layouts[0].parallel.world_size();
  for (int gpus = used; !AnyFits(report.layouts) && gpus <= kMostGpus; gpus *= 2) {
    std::vector<PlannedLayout> others = planner.PlanAll(gpus);
    SortForOneStream(&others);
    const std::vector<const PlannedLayout*> usable = Usable(others);
    if (usable.empty()) continue;
    report.fitting_gpus = gpus;
    report.fitting = usable[0]->parallel;
    break;
  }
  return report;
}

// "TP 4, DP 2, EP".
std::string ShortName(const ParallelConfig& p) {
  std::string name;
  const auto add = [&](const char* kind, int size) {
    if (size > 1) name += fmt::format("{}{} {}", name.empty() ? "" : ", ", kind, size);
  };
  add("TP", p.tensor_parallel_size);
  add("DP", p.data_parallel_size);
  add("PP", p.pipeline_parallel_size);
  if (p.enable_expert_parallel) name += name.empty() ? "EP" : ", EP";
  return name.empty() ? "one GPU" : name;
}

std::string Gib(double bytes) { return fmt::format("{:.2f}", bytes / kGibibyte); }

void PrintRow(const char* name, const MemoryPlan& memory, int64_t (*bytes_of)(const StageMemory&)) {
  fmt::print("  {:<24}", name);
  for (const StageMemory& stage : memory.stages) {
    fmt::print(" {:>9}", Gib(static_cast<double>(bytes_of(stage))));
  }
  fmt::print("\n");
}

void PrintWeights(const MemoryPlan& memory) {
  PrintRow("weights", memory, [](const StageMemory& s) { return s.weight_bytes; });
  for (size_t i = 0; i < memory.stages[0].weights.size(); ++i) {
    fmt::print("    {:<22}", memory.stages[0].weights[i].name);
    for (const StageMemory& stage : memory.stages) {
      fmt::print(" {:>9}", Gib(static_cast<double>(stage.weights[i].bytes)));
    }
    fmt::print("\n");
  }
}

void PrintMemory(const MemoryPlan& memory) {
  fmt::print("\nGiB on a GPU              ");
  for (size_t i = 0; i < memory.stages.size(); ++i) {
    fmt::print(" {:>9}", memory.stages.size() == 1 ? "" : fmt::format("stage {}", i));
  }
  fmt::print("\n");
  PrintWeights(memory);
  PrintRow("workspace of a step", memory, [](const StageMemory& s) { return s.workspace_bytes; });
  PrintRow("logits", memory, [](const StageMemory& s) { return s.logits_bytes; });
  PrintRow("CUDA itself (a guess)", memory, [](const StageMemory&) { return model::kCudaBytes; });
  PrintRow("left for the KV cache", memory, [](const StageMemory& s) { return s.kv_budget_bytes; });
  if (!memory.fits()) return;
  PrintRow("  history blocks", memory,
           [](const StageMemory& s) { return s.pools.num_blocks * s.layout.block_bytes; });
  PrintRow("  window pages", memory, [](const StageMemory& s) {
    return s.pools.num_window_pages * s.layout.window_page_bytes;
  });
  PrintRow("  states, snapshots", memory, [](const StageMemory& s) {
    return s.pools.num_state_slots * s.layout.state.slot_bytes +
           s.pools.num_snapshots * s.layout.snapshot.bytes;
  });
}

void PrintCapacity(const PlanOptions& options, const PlannedLayout& layout) {
  const MemoryPlan& memory = layout.memory;
  if (!memory.fits()) {
    fmt::print("\ndoes not fit: {} GiB more on a GPU are needed for a context of {} tokens\n",
               Gib(static_cast<double>(memory.missing_bytes)), memory.max_model_len);
    return;
  }
  const int data_ranks = layout.parallel.data_parallel_size;
  double token_bytes = 0, request_bytes = 0;
  for (const StageMemory& stage : memory.stages) {
    token_bytes += stage.layout.bytes_per_token();
    request_bytes +=
        static_cast<double>(stage.layout.state.slot_bytes + 3 * stage.layout.window_page_bytes);
  }
  fmt::print("\ncontext       {} tokens\n", memory.max_model_len);
  fmt::print("tokens held   {}{}\n", data_ranks * memory.num_tokens(),
             data_ranks == 1
                 ? ""
                 : fmt::format(", {} on each of {} data ranks", memory.num_tokens(), data_ranks));
  fmt::print("a token       {:.0f} bytes; a request beside its tokens {:.1f} MiB\n", token_bytes,
             request_bytes / (1 << 20));
  fmt::print("at once       (--max-num-seqs {}{})", options.max_num_seqs,
             data_ranks == 1 ? "" : " on each data rank");
  const char* separator = "";
  for (const int64_t length : RequestLengths(options, memory)) {
    fmt::print("{} {} of {} tokens", separator, data_ranks * memory.NumRequests(length), length);
    separator = ",";
  }
  fmt::print("\n");
}

void PrintSpeeds(const PlanReport& report, const PlannedLayout& layout) {
  if (layout.speeds.empty()) return;
  fmt::print("\nat best       on {}: {}\n", report.device.name, report.device.source);
  for (const PlannedSpeed& speed : layout.speeds) {
    const std::string ms = speed.ms == 0 ? "" : fmt::format("{:.3f} ms", speed.ms);
    fmt::print("  {:<38} {:>12} {:>9.0f} tokens/s\n", speed.what, ms, speed.tokens_per_s);
  }
}

// What stands beside layouts that do not run, and what it means.
constexpr const char* kMark = "*";
void ExplainMark(const std::vector<PlannedLayout>& layouts) {
  const bool all_run = std::all_of(layouts.begin(), layouts.end(), [](const PlannedLayout& layout) {
    return RunsOnGpus(layout.parallel);
  });
  if (!all_run) fmt::print("{} fathom serve runs it on CPUs only, so far\n", kMark);
}

void PrintFastest(const std::vector<PlannedLayout>& layouts) {
  const std::vector<const PlannedLayout*> usable = Usable(layouts);
  if (usable.empty()) return;
  const PlannedLayout& many = **std::max_element(
      usable.begin(), usable.end(), [](const PlannedLayout* a, const PlannedLayout* b) {
        return a->output_tokens_per_s < b->output_tokens_per_s;
      });
  fmt::print("one stream is fastest with   {}\n", LayoutFlags(usable[0]->parallel));
  fmt::print("many are fastest with        {}\n", LayoutFlags(many.parallel));
}

void PrintComparison(const PlanOptions& options, const PlanReport& report) {
  fmt::print("\n{:<18} {:>9} {:>9} {:>11} {:>9} {:>9}\n", "layout", "weights", "for KV", "tokens",
             "1 stream", "output");
  fmt::print("{:<18} {:>9} {:>9} {:>11} {:>9} {:>9}\n", "", "GiB/GPU", "GiB/GPU", "held",
             "tokens/s", "tokens/s");
  for (const PlannedLayout& layout : report.layouts) {
    const MemoryPlan& memory = layout.memory;
    const StageMemory& fullest = *std::min_element(
        memory.stages.begin(), memory.stages.end(),
        [](const auto& a, const auto& b) { return a.kv_budget_bytes < b.kv_budget_bytes; });
    fmt::print("{:<18} {:>9} ",
               ShortName(layout.parallel) + (RunsOnGpus(layout.parallel) ? "" : kMark),
               Gib(static_cast<double>(fullest.weight_bytes)));
    if (!memory.fits()) {
      fmt::print("  lacks {} GiB\n", Gib(static_cast<double>(memory.missing_bytes)));
      continue;
    }
    fmt::print("{:>9} {:>11} {:>9.0f} {:>9.0f}\n",
               Gib(static_cast<double>(fullest.kv_budget_bytes)),
               layout.parallel.data_parallel_size * memory.num_tokens(),
               1000 / layout.single_stream_ms, layout.output_tokens_per_s);
  }
  if (!AnyFits(report.layouts)) return;
  fmt::print("\nspeeds are the best that {} could do: {}\n", report.device.name,
             report.device.source);
  fmt::print("1 stream: at 4096 tokens; output: {} streams of {} in, {} out, or as many as fit\n",
             options.num_streams, options.input_len, options.output_len);
  PrintFastest(report.layouts);
  ExplainMark(report.layouts);
}

Status Verdict(const PlanOptions& options, const PlanReport& report) {
  if (AnyFits(report.layouts)) return OkStatus();
  const PlannedLayout& best = report.layouts[0];
  const std::string remedy =
      report.fitting_gpus == 0
          ? fmt::format("nor does it on up to {} GPUs", kMostGpus)
          : fmt::format("it fits on {} with {}", report.fitting_gpus, LayoutFlags(report.fitting));
  return OutOfMemory(fmt::format(
      "{} does not fit on {} x {} with {}: {} GiB more on a GPU are "
      "needed; {}",
      options.model, best.parallel.world_size(), report.device.name, LayoutFlags(best.parallel),
      Gib(static_cast<double>(best.memory.missing_bytes)), remedy));
}

}  // namespace

bool RunsOnGpus(const ParallelConfig& parallel) { return CheckGpuLayout(parallel).ok(); }

std::string LayoutFlags(const ParallelConfig& p) {
  std::string flags;
  const auto add = [&](const char* name, int size) {
    if (size > 1) flags += fmt::format("{}--{} {}", flags.empty() ? "" : " ", name, size);
  };
  add("tensor-parallel-size", p.tensor_parallel_size);
  add("data-parallel-size", p.data_parallel_size);
  add("pipeline-parallel-size", p.pipeline_parallel_size);
  if (p.enable_expert_parallel) {
    flags += fmt::format("{}--enable-expert-parallel", flags.empty() ? "" : " ");
  }
  return flags.empty() ? "--tensor-parallel-size 1" : flags;
}

std::vector<int64_t> RequestLengths(const PlanOptions& options, const MemoryPlan& memory) {
  std::vector<int64_t> lengths = {options.input_len + options.output_len, 8192, 131072, 1048576,
                                  memory.max_model_len};
  std::erase_if(lengths, [&](int64_t length) { return length > memory.max_model_len; });
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  return lengths;
}

Status RunPlan(const PlanOptions& options) {
  ASSIGN_OR_RETURN(const PlanReport report, MakeReport(options));
  const PlannedLayout& first = report.layouts[0];
  if (options.json) {
    fmt::print("{}\n", PlanJson(options, report));
    return Verdict(options, report);
  }
  const double memory_bytes = report.device.memory_bytes;
  fmt::print("{} on {} x {} of {:.1f} GiB, of which {:.1f} may be used", options.model,
             first.parallel.world_size(), report.device.name, memory_bytes / kGibibyte,
             memory_bytes / kGibibyte * options.gpu_memory_utilization);
  if (options.num_gpus > 0 && !HasLayout(options)) {
    fmt::print("\n");
    PrintComparison(options, report);
  } else {
    fmt::print(", {}{}\n", LayoutFlags(first.parallel), RunsOnGpus(first.parallel) ? "" : kMark);
    PrintMemory(first.memory);
    PrintCapacity(options, first);
    PrintSpeeds(report, first);
    ExplainMark(report.layouts);
  }
  return Verdict(options, report);
}

}  // namespace fathom::app
