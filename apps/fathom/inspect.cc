#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <vector>

#include "apps/fathom/commands.h"
#include "apps/fathom/model_session.h"
#include "apps/fathom/progress.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/summary.h"
#include "device/cuda/multi_gpu.h"
#include "kv_cache/kv_layout.h"
#include "model/layout_roofline.h"

namespace fathom::app {
namespace {

using config::LayerKind;
using config::ModelConfig;

const char* DraftName(config::DraftKind kind) {
  switch (kind) {
    case config::DraftKind::kNone:
      return "no draft";
    case config::DraftKind::kMtp:
      return "MTP draft";
    case config::DraftKind::kDSpark:
      return "DSpark draft";
  }
  return "";
}

void PrintModel(const ModelConfig& c) {
  fmt::print("layers        {} ({} window-only, {} ratio 4, {} ratio 128; {} hash-routed), {}\n",
             c.num_layers, c.num_layers_of(LayerKind::kWindow), c.num_layers_of(LayerKind::kC4),
             c.num_layers_of(LayerKind::kC128), c.num_hash_layers, DraftName(c.draft));
  fmt::print(
      "sizes         hidden {}, {} heads of {}, {} experts of {} ({} + {} a token), vocabulary "
      "{}\n",
      c.hidden_size, c.num_heads, c.head_dim, c.num_experts, c.moe_intermediate_size,
      c.num_experts_per_token, c.num_shared_experts, c.vocab_size);
  fmt::print("context       {} tokens, index top-k {}\n", c.max_position_embeddings, c.index_topk);
}

void PrintWeights(const checkpoint::ModelSummary& summary) {
  fmt::print("parameters    {:.2f}B, {:.2f}B active a token, {:.2f}B of them in the draft\n",
             static_cast<double>(summary.num_params) / 1e9,
             static_cast<double>(summary.num_active_params) / 1e9,
             static_cast<double>(summary.num_draft_params) / 1e9);
  fmt::print("weights       {} in {} tensors\n", FormatBytes(static_cast<double>(summary.bytes)),
             summary.num_tensors);
  for (const checkpoint::PartSummary& part : summary.parts) {
    fmt::print("  {:<22} {:>10}  {:>5.1f}%  {:>10.1f}M parameters\n", part.name,
               FormatBytes(static_cast<double>(part.bytes)),
               100.0 * static_cast<double>(part.bytes) / static_cast<double>(summary.bytes),
               static_cast<double>(part.num_params) / 1e6);
  }
}

void PrintKvCache(const ModelConfig& c) {
  fmt::print("KV cache\n");
  using kv_cache::IndexKeyDType;
  for (const auto& [name, numerics, dtype] :
       {std::tuple{"FP4 index keys", config::Numerics::kOfficial, IndexKeyDType::kFp4},
        std::tuple{"FP8 index keys", config::Numerics::kOfficial, IndexKeyDType::kFp8},
        std::tuple{"fp32 numerics", config::Numerics::kFp32, IndexKeyDType::kFp32}}) {
    const kv_cache::KvLayout layout = kv_cache::MakeKvLayout(c, numerics, dtype);
    fmt::print(
        "  {:<22} {:>10.0f} bytes a token; 1M tokens {}; a window page {}, a state slot {}\n", name,
        layout.bytes_per_token(), FormatBytes(layout.bytes_per_token() * (1 << 20)),
        FormatBytes(static_cast<double>(layout.window_page_bytes)),
        FormatBytes(static_cast<double>(layout.state.slot_bytes)));
  }
}

const char* TypeName(model::ProductType type) {
  switch (type) {
    case model::ProductType::kFp8:
      return "FP8";
    case model::ProductType::kBf16:
      return "BF16";
    case model::ProductType::kFp32:
      return "BF16x3";
  }
  return "";
}

// One step of one rank; `per` divides all (a prefill is shown per token).
void PrintCosts(const model::LayoutRoofline::Stage& stage, const model::StepShape& shape,
                const model::DeviceCeilings& ceilings, double per) {
  const auto costs = StepCosts(stage.share, stage.layout, shape);
  const auto exchanges = StepExchanges(stage.share, shape);
  fmt::print("  {:<28} {:<7} {:>11} {:>11} {:>10} {:>10}\n", "product", "type", "weights", "KV",
             "GFLOP", "us");
  for (const model::ProductCost& cost : costs) {
    const model::RooflineTime time = Price({cost}, ceilings);
    fmt::print("  {:<28} {:<7} {:>11} {:>11} {:>10.3f} {:>10.3f}\n", cost.name, TypeName(cost.type),
               FormatBytes(cost.weight_bytes / per), FormatBytes(cost.kv_bytes / per),
               cost.flops / per / 1e9, time.floor_us() / per);
  }
  for (const model::ExchangeCost& exchange : exchanges) {
    const model::RooflineTime time = Price({}, {exchange}, ceilings);
    fmt::print("  {:<28} {:<7} {:>11} {:>11} {:>10} {:>10.3f}\n", exchange.name,
               fmt::format("x {:.0f}", exchange.count), FormatBytes(exchange.bytes / per), "", "",
               std::max(time.link_us, time.exchange_us) / per);
  }
  const model::RooflineTime total = Price(costs, exchanges, ceilings);
  fmt::print("  floor on {}: {:.1f} us by bytes ({:.2f} TB/s), {:.1f} us by arithmetic",
             ceilings.name, total.bytes_us / per, ceilings.memory_bytes_per_s / 1e12,
             total.compute_us / per);
  if (!exchanges.empty()) {
    fmt::print(", {:.1f} us by the link ({:.0f} GB/s), and {:.1f} us of waiting for others",
               total.link_us / per, ceilings.link_bytes_per_s / 1e9, total.exchange_us / per);
  }
  fmt::print(": {:.1f} us\n", total.floor_us() / per);
}

void PrintRoofline(const model::LayoutRoofline& layout, const InspectOptions& options) {
  const model::DeviceCeilings& ceilings = *model::FindDevice(options.gpu);
  // The batch is the rank's own; every other data rank has as many.
  const int64_t others = options.parallel.data_parallel_size - 1;
  const model::StepShape decode{.num_seqs = options.batch,
                                .tokens_per_seq = 1,
                                .context_tokens = options.context,
                                .logits_rows = options.batch,
                                .other_tokens = others * options.batch};
  const model::StepShape prefill{.tokens_per_seq = static_cast<int>(options.context),
                                 .other_tokens = others * options.context};
  const size_t num_stages = layout.stages().size();
  for (size_t i = 0; i < num_stages; ++i) {
    const std::string where =
        fmt::format("{}{}", num_stages == 1 ? "" : fmt::format(", stage {}", i),
                    options.parallel.world_size() == 1 ? "" : ", the rank with most to do");
    fmt::print("\nDecode, one step of {} sequences at {} tokens{}\n", options.batch,
               options.context, where);
    PrintCosts(layout.stages()[i], decode, ceilings, 1);
    fmt::print("\nPrefill of {} tokens, per token{}\n", options.context, where);
    PrintCosts(layout.stages()[i], prefill, ceilings, static_cast<double>(options.context));
  }
}

// How the GPUs of this machine reach each other; nothing without any.
void PrintGpus() {
  std::vector<int> gpus(static_cast<size_t>(device::CountGpus()));
  std::iota(gpus.begin(), gpus.end(), 0);
  if (gpus.empty()) return;
  fmt::print("this machine  {}\n", device::DescribeTopology(gpus, device::ProbePeerLink));
}

}  // namespace

Result<ModelConfig> FindModelConfig(const std::string& name, int layers) {
  const bool is_preset = name == "flash" || name == "pro" || name == "tiny";
  if (is_preset || std::filesystem::is_regular_file(name)) {
    ASSIGN_OR_RETURN(const std::string text, ReadConfigText(name, layers));
    return checkpoint::ParseModelConfig(text, name);
  }
  if (layers > 0) return InvalidArgument("--layers goes with flash, pro, tiny or a config.json");
  ASSIGN_OR_RETURN(const std::string folder,
                   checkpoint::ResolveModelFolder(name, HuggingFaceHome()));
  return checkpoint::LoadModelConfig(folder);
}

Status RunInspect(const InspectOptions& options) {
  ASSIGN_OR_RETURN(const ModelConfig config, FindModelConfig(options.model, options.layers));
  ASSIGN_OR_RETURN(
      const model::LayoutRoofline layout,
      model::LayoutRoofline::Make(config, options.parallel, kv_cache::IndexKeyDType::kFp4));
  PrintModel(config);
  PrintWeights(checkpoint::Summarize(config));
  PrintKvCache(config);
  PrintGpus();
  if (options.roofline) PrintRoofline(layout, options);
  return OkStatus();
}

}  // namespace fathom::app
