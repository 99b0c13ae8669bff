#include "model/layout_roofline.h"

#include <algorithm>
#include <utility>

namespace fathom::model {

using config::ParallelConfig;

namespace {

RooflineTime PriceStage(const LayoutRoofline::Stage& stage, const StepShape& shape,
                        const DeviceCeilings& ceilings) {
  return Price(StepCosts(stage.share, stage.layout, shape), StepExchanges(stage.share, shape),
               ceilings);
}

}  // namespace

Result<LayoutRoofline> LayoutRoofline::Make(const config::ModelConfig& config,
                                            const ParallelConfig& parallel,
                                            kv_cache::IndexKeyDType index_dtype) {
  LayoutRoofline roofline(parallel);
  for (int stage = 0; stage < parallel.pipeline_parallel_size; ++stage) {
    // Where parts are uneven, the last ranks have the larger ones.
    ASSIGN_OR_RETURN(RankShare share, MakeRankShare(config, parallel,
                                                    {.tensor = parallel.tensor_parallel_size - 1,
                                                     .data = parallel.data_parallel_size - 1,
                                                     .pipeline = stage}));
    const kv_cache::KvLayout layout =
        kv_cache::MakeKvLayout(share.shard.config, config::Numerics::kOfficial, index_dtype);
    roofline.stages_.push_back({std::move(share), layout});
  }
  return roofline;
}

int LayoutRoofline::SeqsOfDataRank(int num_streams) const {
  const int ranks = parallel_.data_parallel_size;
  return (num_streams + ranks - 1) / ranks;
}

StepShape LayoutRoofline::DecodeShape(int num_streams, int64_t context_tokens) const {
  const int own = SeqsOfDataRank(num_streams);
  return {.num_seqs = own,
          .tokens_per_seq = 1,
          .context_tokens = context_tokens,
          .logits_rows = own,
          .other_tokens = num_streams - own};
}

double LayoutRoofline::DecodeUs(int num_streams, int64_t context_tokens,
                                const DeviceCeilings& ceilings) const {
  double us = 0;
  for (const Stage& stage : stages_) {
    us += PriceStage(stage, DecodeShape(num_streams, context_tokens), ceilings).floor_us();
  }
  return us;
}

double LayoutRoofline::PrefillUs(int64_t prompt_len, int64_t max_step_tokens,
                                 const DeviceCeilings& ceilings) const {
  double us = 0;
  for (int64_t done = 0; done < prompt_len; done += max_step_tokens) {
    const int64_t tokens = std::min(max_step_tokens, prompt_len - done);
    const StepShape shape{.tokens_per_seq = static_cast<int>(tokens),
                          .context_tokens = done,
                          .logits_rows = done + tokens == prompt_len ? 1 : 0};
    for (const Stage& stage : stages_) us += PriceStage(stage, shape, ceilings).floor_us();
  }
  return us;
}

double LayoutRoofline::OutputTokensPerSecond(const Workload& load,
                                             const DeviceCeilings& ceilings) const {
  const int own = SeqsOfDataRank(load.num_streams);
  const StepShape decode = DecodeShape(load.num_streams, load.input_len + load.output_len / 2);
  // A prompt of its own, and as many tokens of each other data rank.
  const StepShape prefill{
      .tokens_per_seq = static_cast<int>(load.input_len),
      .other_tokens = load.input_len * (load.num_streams - own) / std::max(1, own)};
  const auto steps = static_cast<double>(load.output_len);
  double us = 0;
  for (const Stage& stage : stages_) {
    const RooflineTime step = PriceStage(stage, decode, ceilings);
    const RooflineTime prompt = PriceStage(stage, prefill, ceilings);
    const RooflineTime all{.bytes_us = steps * step.bytes_us,
                           .compute_us = steps * step.compute_us + own * prompt.compute_us,
                           .link_us = steps * step.link_us + own * prompt.link_us,
                           .exchange_us = steps * step.exchange_us};
    us += all.floor_us();
  }
  return load.num_streams * steps / us * 1e6;
}

std::vector<ParallelConfig> CandidateLayouts(int num_gpus) {
  std::vector<ParallelConfig> layouts;
  for (int stages = 1; stages <= num_gpus; ++stages) {
    if (num_gpus % stages != 0) continue;
    const int ranks = num_gpus / stages;
    for (int tensor = ranks; tensor >= 1; --tensor) {
      if (ranks % tensor != 0) continue;
      const int data = ranks / tensor;
      if (stages > 1 && tensor > 1 && data > 1) continue;
      const ParallelConfig layout{tensor, data, stages, data > 1};
      layouts.push_back(layout);
      if (data > 1 || tensor == 1) continue;
      layouts.push_back({tensor, data, stages, true});
    }
  }
  return layouts;
}

}  // namespace fathom::model
