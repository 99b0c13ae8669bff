// LayoutRoofline: how fast a layout could be at best, all ranks together. Pure; values; any thread.
//
// A step is over when its slowest rank is; stages work one after the other. Nothing else can be
// counted on: what one stage computes while another waits is not.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "model/roofline.h"

namespace fathom::model {

// Requests of one size that come as others end.
struct Workload {
  int num_streams = 64;
  int64_t input_len = 1024;
  int64_t output_len = 1024;
};

class LayoutRoofline {
 public:
  // kInvalidArgument: the model cannot be split so.
  static Result<LayoutRoofline> Make(const config::ModelConfig& config,
                                     const config::ParallelConfig& parallel,
                                     kv_cache::IndexKeyDType index_dtype);

  // One step of so many sequences, spread over the data ranks, with `context_tokens` each.
  double DecodeUs(int num_streams, int64_t context_tokens, const DeviceCeilings& ceilings) const;

  // One prompt alone, in steps of at most `max_step_tokens`: the time to its first token.
  double PrefillUs(int64_t prompt_len, int64_t max_step_tokens,
                   const DeviceCeilings& ceilings) const;

  // Of the workload: answers are decoded together, and prompts computed in the same steps at no
  // cost but their arithmetic and what they exchange.
  double OutputTokensPerSecond(const Workload& load, const DeviceCeilings& ceilings) const;

  // One stage's rank that has most to do, with its layout of the KV cache.
  struct Stage {
    RankShare share;
    kv_cache::KvLayout layout;
  };
  const std::vector<Stage>& stages() const { return stages_; }

 private:
  explicit LayoutRoofline(const config::ParallelConfig& parallel) : parallel_(parallel) {}
  int SeqsOfDataRank(int num_streams) const;
  StepShape DecodeShape(int num_streams, int64_t context_tokens) const;

  config::ParallelConfig parallel_;
  std::vector<Stage> stages_;
};

// The layouts of so many GPUs that somebody may want, the model left out: tensor parallel alone,
// data parallel attention with whole experts spread over all, mixtures, and stages of these.
std::vector<config::ParallelConfig> CandidateLayouts(int num_gpus);

}  // namespace fathom::model
