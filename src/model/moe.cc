#include <algorithm>
#include <numeric>

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/moe_route/moe_route.h"
#include "model/layers.h"

namespace fathom::model {
namespace {

using Who = RankGroups::Who;
using Ranges = std::vector<comm::Group::Range>;

// The experts of a step, spread over the ranks of the stage: each has some experts or some rows of
// all, and rows of its data rank's shared expert. Between the products all complete what they have.
template <typename T>
class ExpertPass {
 public:
  ExpertPass(StepContext<T>& step, const MoeWeights& weights)
      : s_(step), c_(step.config), ranks_(step.ranks), weights_(weights) {}

  // `x`: the tokens of all data ranks. The data rank's own tokens end up in the workspace's y.
  Status Run(const T* x) {
    int64_t first = 0;
    for (int d = 0; d < ranks_.size(Who::kData); ++d) {
      const int64_t count = s_.data_rank_tokens[static_cast<size_t>(d)];
      RETURN_IF_ERROR(RunTokens(x, first, count, d == ranks_.rank(Who::kData)));
      first += count;
    }
    return OkStatus();
  }

 private:
  Status RunTokens(const T* x, int64_t first, int64_t count, bool own) {
    const int64_t k = c_.num_experts_per_token, intermediate = c_.moe_intermediate_size;
    const auto rows = [&](Who who) {
      return kernels::ExpertRows{
          ranks_.PartOf(who, intermediate, checkpoint::kQuantizedRows).begin,
          ranks_.PartOf(who, c_.hidden_size, checkpoint::kQuantizedRows).begin};
    };
    const kernels::ExpertParams<T> params{
        .x = x + first * c_.hidden_size,
        .num_tokens = count,
        .hidden = c_.hidden_size,
        .experts = weights_.experts,
        .shared = own ? &weights_.shared : nullptr,
        .routed_rows = ranks_.has_whole_experts() ? kernels::ExpertRows{} : rows(Who::kStage),
        .shared_rows = rows(Who::kTensor),
        .num_chosen = c_.num_experts_per_token,
        .expert_ids = s_.ws.expert_ids + first * k,
        .weights = s_.ws.expert_weights + first * k,
        .swiglu_limit = static_cast<float>(c_.swiglu_limit),
        .y = s_.ws.y,
        .workspace = s_.ws.experts};
    for (int64_t begin = 0; begin < count; begin += s_.ws.experts.max_tokens) {
      const int64_t size = std::min(s_.ws.experts.max_tokens, count - begin);
      RETURN_IF_ERROR(RunPiece(kernels::ExpertPiece<T>(params, begin, size), own ? size : 0));
    }
    return OkStatus();
  }

  Status RunPiece(kernels::ExpertPiece<T> piece, int64_t num_own) {
    ThreadPool& pool = s_.stream.thread_pool();
    piece.GateUp(pool);
    RETURN_IF_ERROR(
        Complete(piece, c_.moe_intermediate_size, &kernels::ExpertPiece<T>::Intermediate, num_own));
    piece.Down(pool);
    RETURN_IF_ERROR(Complete(piece, c_.hidden_size, &kernels::ExpertPiece<T>::Output, num_own));
    if (num_own > 0) piece.Combine(pool);
    return OkStatus();
  }

  // The rows of routed pairs, and of the shared expert's, of which each rank has computed a part.
  Status Complete(const kernels::ExpertPiece<T>& piece, int64_t size,
                  T* (kernels::ExpertPiece<T>::*row)(int64_t) const, int64_t num_own) {
    constexpr int64_t kUnit = checkpoint::kQuantizedRows;
    const int64_t num_routed = piece.num_routed_pairs();
    if (ranks_.has_whole_experts()) {
      Ranges pairs;
      for (const auto& experts : ranks_.PartsOf(Who::kStage, c_.num_experts, 1)) {
        pairs.push_back({piece.first_pair(experts.begin), piece.first_pair(experts.end)});
      }
      RETURN_IF_ERROR(ranks_.GatherRows(Who::kStage, (piece.*row)(0), size, pairs));
    } else {
      RETURN_IF_ERROR(ranks_.GatherColumns(Who::kStage, (piece.*row)(0), num_routed,
                                           ranks_.PartsOf(Who::kStage, size, kUnit)));
    }
    return ranks_.GatherColumns(Who::kTensor, (piece.*row)(num_routed), num_own,
                                ranks_.PartsOf(Who::kTensor, size, kUnit));
  }

  StepContext<T>& s_;
  const config::ModelConfig& c_;
  RankGroups& ranks_;
  const MoeWeights& weights_;
};

// The tokens of all data ranks, and what they chose.
template <typename T>
Status GatherTokens(StepContext<T>& step, const T* x, int64_t first) {
  const int64_t hidden = step.config.hidden_size, k = step.config.num_experts_per_token;
  Workspace<T>& ws = step.ws;
  Ranges rows;
  for (const int32_t count : step.data_rank_tokens) {
    const int64_t begin = rows.empty() ? 0 : rows.back().end;
    rows.push_back({begin, begin + count});
  }
  std::copy_n(x, step.num_tokens() * hidden, ws.all_x + first * hidden);
  RETURN_IF_ERROR(step.ranks.GatherRows(Who::kData, ws.all_x, hidden, rows));
  RETURN_IF_ERROR(step.ranks.GatherRows(Who::kData, ws.expert_ids, k, rows));
  return step.ranks.GatherRows(Who::kData, ws.expert_weights, k, rows);
}

}  // namespace

template <typename T>
Status RunMoe(StepContext<T>& step, int layer, const MoeWeights& weights) {
  const config::ModelConfig& c = step.config;
  Workspace<T>& ws = step.ws;
  const int64_t m = step.num_tokens(), k = c.num_experts_per_token;
  const std::span<const int32_t> tokens_of = step.data_rank_tokens;
  const auto own = tokens_of.begin() + step.ranks.rank(Who::kData);
  const int64_t first = std::accumulate(tokens_of.begin(), own, int64_t{0});
  int32_t* const expert_ids = ws.expert_ids + first * k;
  if (m > 0) Linear(ws.h, m, weights.gate, ws.router_logits, step.stream);
  kernels::Launch(kernels::MoeRouteParams{.logits = ws.router_logits,
                                          .num_tokens = m,
                                          .num_experts = c.num_experts,
                                          .num_chosen = c.num_experts_per_token,
                                          .bias = weights.bias,
                                          .tid2eid = weights.tid2eid,
                                          .token_ids = ws.token_ids,
                                          .scaling = static_cast<float>(c.routed_scaling_factor),
                                          .expert_ids = expert_ids,
                                          .weights = ws.expert_weights + first * k},
                  step.stream);
  if (!step.expert_ids.empty()) {
    std::copy_n(expert_ids, m * k, step.expert_ids.begin() + layer * m * k);
  }
  if (step.recorder != nullptr) {
    for (int64_t t = 0; t < m; ++t) {
      step.recorder->OnRouting(layer, static_cast<int>(t),
                               {expert_ids + t * k, static_cast<size_t>(k)});
    }
  }
  const T* x = Quantize(ws.h, m, c.hidden_size, ws.h_fp8, step.stream);
  if (step.ranks.size(Who::kData) > 1) {
    RETURN_IF_ERROR(GatherTokens(step, x, first));
    x = ws.all_x;
  }
  return ExpertPass<T>(step, weights).Run(x);
}

template Status RunMoe(StepContext<BFloat16>&, int, const MoeWeights&);
template Status RunMoe(StepContext<float>&, int, const MoeWeights&);

}  // namespace fathom::model
