// CudaTensorRanks: what a step on a GPU does with the other tensor ranks': which of the weights'
// rows and of a prompt's tokens this one has, and the exchanges that complete what they compute.
// Everything is enqueued; every rank calls the same. Where there is one rank nothing is exchanged.
// The workspace outlives it; one thread.
#pragma once

#include <span>
#include <vector>

#include "comm/cuda_collectives.h"
#include "config/model_config.h"
#include "kernels/grouped_gemm/experts_cuda.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "model/cuda_step.h"
#include "model/cuda_weights.h"
#include "model/cuda_workspace.h"

namespace fathom::model {

// Of a layer's attention what a step runs: all of it, or the rank's heads and groups; then of wo_b
// the rank's outputs, or the columns that read its groups.
struct AttentionPart {
  kernels::TiledMatrix wq_b, wo_a, wo_b;
  const float* sink = nullptr;
  int num_heads = 0;
  int num_groups = 0;
};

class CudaTensorRanks {
 public:
  // The shard's config; of all ranks the columns that wo_b reads. collectives null: there is one.
  // has_whole_attention: Shard::whole_attention. has_whole_experts: their output needs no others.
  CudaTensorRanks(const config::ModelConfig& config, const CudaWorkspace& workspace,
                  comm::CudaCollectives* collectives, int64_t grouped_columns,
                  bool has_whole_attention, bool has_whole_experts);

  bool are_several() const { return collectives_ != nullptr; }
  bool are_captured() const { return collectives_ == nullptr || collectives_->is_captured(); }
  // As CudaCollectives' Check; and the first error of an exchange.
  Status Check() const { return collectives_ == nullptr ? OkStatus() : collectives_->Check(); }
  const Status& exchanged() const { return exchanged_; }
  void EndStep(const CudaStep& step) const {
    if (collectives_ != nullptr) collectives_->EndStep(*step.stream);
  }

  // What this rank has: of the intermediate size; of a sub-layer's output and of the logits.
  int64_t num_intermediate() const;
  int64_t num_outputs() const { return outputs_.count(rank()); }
  int64_t first_output() const { return outputs_.begin[rank()]; }
  int64_t first_word() const { return vocabulary_.begin[rank()]; }
  // The columns of tiles from this rank's first on.
  kernels::Fp8Tiles OwnGroups(const kernels::Fp8Tiles& grouped) const {
    return Own(grouped, grouped_);
  }
  kernels::Fp8Tiles OwnIntermediates(const kernels::Fp8Tiles& t) const {
    return Own(t, intermediate_);
  }

  // The step of this rank's share of the tokens; all of it, where they are not shared out.
  CudaStep ShareOf(const CudaStep& step) const;
  AttentionPart PartOf(const CudaStep& step, const CudaBlockWeights& w) const;

  // Decodes: whether wo_b gives a part of all sums (ws.output_sums), which the boundary adds up, so
  // that wo_a's output is the rank's own.
  bool AddsOutputs(const CudaStep& step) const {
    return !step.prefill && step.batch.num_tokens <= most_added_tokens_;
  }
  // Of one token's `layer`, where these sums end in the boundary and the experts are one launch on
  // all ranks (RankOfExperts): what routing awaits instead of the boundary's end.
  kernels::RouteInput RouteInput(const CudaStep& step, int layer, const CudaBlockWeights& w) const;
  // The exchange of these sums, which begins with wo_b's product and ends in the boundary.
  const kernels::PeerExchange& BeginSums();
  // Whether ranks of attention have few rows: CudaGemmParams::few_rows.
  bool HaveFewRows() const;

  // Where the products of attention, and the experts' first, write what all ranks read to all of
  // them: then only that it is there is exchanged.
  kernels::Mirrors MirrorsOf(const CudaStep& step) const;

  // Who may share out what one token's index scores are of. Of size 1: nobody.
  kernels::PeerView SelectingRanks(const CudaStep& step) const;

  // Decodes: how ranks run the experts' products in one launch, in which they exchange the
  // intermediates, and which sends one token's outputs to the boundary. Its exchange of size 1:
  // they run them apart, as where are_large (ExpertPlan::is_large).
  kernels::ExpertRank RankOfExperts(const CudaStep& step, bool are_large);

  // The exchanges tell a recorder that they are the layer's.
  //
  // Of `output` each rank has some columns. Either the boundary of `num_rows` tokens, or rows of
  // the last one, completes it, by the exchange that is returned, or `output` becomes the whole.
  kernels::OutputExchange CompleteOutput(const CudaStep& step, int layer, int64_t num_rows,
                                         bool is_last, kernels::SublayerOutput& output);
  // Of the rows of tokens each rank has some columns; of those of tokens and their pairs.
  void CompleteGroups(const CudaStep& step, int layer, const kernels::Fp8Tiles& grouped);
  void CompleteIntermediates(const CudaStep& step, int layer, const kernels::Fp8Tiles& t);
  void CompleteLogits(const CudaStep& step);

  // Where tokens are shared out, each rank has rows of its own. Of all tokens what a rank's need:
  // window entries and compressors' rows; the experts' input with its experts; and, as the last
  // layer's experts found them, the streams.
  // Where SendsAhead, keys and input are sent while other work is done, and only then gathered.
  bool SendsAhead(const CudaStep& share) const;
  void SendKeys(const CudaStep& share, const CudaBlockWeights& w);
  void GatherKeys(const CudaStep& share, int layer, const CudaBlockWeights& w);
  void SendInput(const CudaStep& share);
  void GatherRouted(const CudaStep& share, int layer);
  void GatherStreams(const CudaStep& share);

 private:
  int rank() const { return collectives_ == nullptr ? 0 : collectives_->rank(); }
  int size() const { return collectives_ == nullptr ? 1 : collectives_->size(); }
  kernels::RankParts PartsOf(int64_t total, int64_t unit, int64_t each) const;
  int64_t MostAddedTokens() const;
  bool IsCompletedInBoundary(int64_t num_rows, int num_chosen, bool is_last) const;
  kernels::Fp8Tiles Own(const kernels::Fp8Tiles& tiles, const kernels::RankParts& blocks) const;
  kernels::RankParts SharesOf(const CudaStep& share) const;

  void Tell(const CudaStep& step, int layer, const char* name) const;
  void AwaitMirrors(const CudaStep& step, int layer, const char* name);
  void GatherTiles(const CudaStep& step, const kernels::CudaGatherTilesParams& params);
  std::vector<kernels::GatheredMatrix> KeysOf(const CudaStep& share,
                                              const CudaBlockWeights& w) const;
  std::vector<kernels::GatheredMatrix> InputOf(const CudaStep& share) const;
  void Gather(const CudaStep& share, int layer, const char* name,
              std::span<const kernels::GatheredMatrix> matrices);
  void Keep(const Status& status);

  const config::ModelConfig c_;
  const CudaWorkspace& ws_;
  comm::CudaCollectives* const collectives_;
  const bool has_whole_attention_;  // then prompts' tokens are shared out
  const bool has_whole_experts_;
  // What each rank has: of wo_a's output and of t in blocks of 128 columns; of a sub-layer's output
  // and of the logits.
  kernels::RankParts grouped_, intermediate_, outputs_, vocabulary_;
  int64_t most_added_tokens_ = 0;
  kernels::OutputExchange sums_, rows_;  // of the layer that is being enqueued
  Status exchanged_;
};

}  // namespace fathom::model
