#include "checkpoint/shard.h"
#include "kernels/moe_route/moe_route_cuda.h"
#include "model/cuda_layers.h"

namespace fathom::model {
namespace {

// One layer's experts: which ones a token chose, then their outputs, a row for each.
class MoePass : CudaPass {
 public:
  MoePass(const CudaContext& context, const CudaLayer& layer) : CudaPass(context, layer) {}

  kernels::SublayerOutput Run() {
    Route();
    if (context_.expert_ranks != nullptr) return ExpertsOfAllRanks(*context_.expert_ranks);
    Experts();
    return {ws_.pairs, ws_.plan.pair_of, c_.num_experts_per_token};
  }

 private:
  // A share's tokens choose their experts on this rank; who has all tokens' choices plans for all.
  void Route() {
    kernels::CudaMoeRouteParams route = RouteParams(share_);
    route.plans = context_.expert_ranks == nullptr && !share_.is_share();
    context_.recording.ForceRouting(step_, layer_.idx, route);
    if (ranks_.SendsAhead(share_)) ranks_.SendInput(share_);
    operators_.Enqueue(share_, "routing", route);
    if (share_.is_share()) {
      ranks_.GatherRouted(share_, layer_.idx);
      route = RouteParams(step_);
      route.is_chosen = true;
      operators_.Enqueue(step_, "plan", route);
    }
    context_.recording.TellRouting(step_, layer_.idx, ExpertIds(step_));
  }

  // Of the step's own tokens, or the share's.
  kernels::CudaMoeRouteParams RouteParams(const CudaStep& step) const {
    return {.gate = w_.gate,
            .h = context_.H(step),
            .input = ranks_.RouteInput(step, layer_.idx, w_),
            .scores = ws_.router_scores,
            .board = ws_.route_board,
            .num_tokens = step.batch.num_tokens,
            .prefill = step.prefill,
            .num_experts = c_.num_experts,
            .num_chosen = c_.num_experts_per_token,
            .bias = w_.bias,
            .tid2eid = w_.tid2eid,
            .token_ids = TokenIds(step),
            .token_seq = step.batch.token_seq,
            .scaling = static_cast<float>(c_.routed_scaling_factor),
            .expert_ids = ExpertIds(step),
            .weights = ExpertWeights(step),
            .plan = Plan(step.batch.num_tokens, step.prefill),
            .hidden = c_.hidden_size,
            .x = context_.HFp8(step),
            .gathered = Gathered()};
  }

  // The embedding has them all; of later stages the host does.
  const int32_t* TokenIds(const CudaStep& step) const {
    return context_.is_first_stage ? ws_.token_ids + step.first_token : step.token_ids;
  }
  // [tokens, k].
  int32_t* ExpertIds(const CudaStep& step) const {
    const int64_t rows = layer_.idx * TotalRowGroups(step) * kernels::kTileRows + step.first_token;
    return ws_.expert_ids + rows * c_.num_experts_per_token;
  }
  float* ExpertWeights(const CudaStep& step) const {
    return ws_.expert_weights + int64_t{step.first_token} * c_.num_experts_per_token;
  }
  kernels::Fp8Tiles Gathered() const {
    return {ws_.gathered, ws_.gathered_scales, ws_.pair_rows / 8};
  }

  kernels::ExpertPlan Plan(int64_t num_tokens, bool prefill) const {
    kernels::ExpertPlan plan = ws_.plan;
    plan.is_large = kernels::AreLargeExperts(num_tokens, prefill, c_.expert_dtype);
    plan.has_narrow = plan.is_large && c_.expert_dtype == config::ExpertDType::kFp4;
    return plan;
  }

  // With whole matrices; experts are the caller's.
  kernels::CudaExpertParams ExpertParams(int64_t num_tokens, bool prefill) const {
    return {.num_tokens = num_tokens,
            .hidden = c_.hidden_size,
            .intermediate = c_.moe_intermediate_size,
            .num_chosen = c_.num_experts_per_token,
            .swiglu_limit = static_cast<float>(c_.swiglu_limit),
            .routed = w_.routed,
            .shared = w_.shared,
            .x = context_.HFp8(step_),
            .gathered = Gathered(),
            .plan = Plan(num_tokens, prefill),
            .t = {ws_.t, ws_.t_scales, ws_.pair_rows / 8},
            .t_packets = ws_.t_packets,
            .y = ws_.pairs,
            .y_stride = c_.hidden_size};
  }

  // On tensor ranks of all experts the rank's columns, in one launch or, exchanged between, in two.
  void Experts() {
    kernels::CudaExpertParams p = ExpertParams(step_.batch.num_tokens, step_.prefill);
    p.num_experts = c_.num_experts;
    p.plan.as_words =
        kernels::RoutesAtOnce(p.num_tokens, step_.prefill, p.num_experts, c_.hidden_size);
    p.y += ranks_.first_output();
    const kernels::ExpertRank rank = ranks_.RankOfExperts(step_, p.plan.is_large);
    if (!ranks_.are_several()) {
      operators_.Enqueue(step_, "experts", p);
    } else if (rank.exchange.peers.size > 1) {
      operators_.Enqueue(step_, "experts", p, rank);
    } else {
      GateUpThenDown(p);
    }
  }
  void GateUpThenDown(kernels::CudaExpertParams p) {
    const kernels::Fp8Tiles t = p.t;
    p.intermediate = ranks_.num_intermediate();
    p.t = ranks_.OwnIntermediates(t);
    p.mirrors = ranks_.MirrorsOf(step_);
    operators_.EnqueueBy(step_, "experts", [&] {
      if (p.intermediate > 0) kernels::LaunchGateUp(p, *step_.stream);
    });
    ranks_.CompleteIntermediates(step_, layer_.idx, t);
    p.hidden = ranks_.num_outputs();
    p.intermediate = c_.moe_intermediate_size;
    p.t = t;
    operators_.EnqueueBy(step_, "experts, down", [&] {
      if (p.hidden > 0) kernels::LaunchDown(p, *step_.stream);
    });
  }

  // The rank's whole routed experts on the tokens of all data ranks, the shared one on its own.
  kernels::SublayerOutput ExpertsOfAllRanks(comm::CudaExpertRanks& ranks) {
    const auto own = checkpoint::Part(c_.num_experts, 1, ranks.rank(), ranks.size());
    const int64_t slots = kernels::ExpertSlots(ranks.num_data_ranks(), step_.most_tokens);
    device::Stream& stream = *step_.stream;
    operators_.EnqueueBy(step_, "tokens to all ranks", [&] {
      ranks.Send({.to = {},
                  .num_tokens = step_.batch.num_tokens,
                  .x = context_.HFp8(step_),
                  .expert_ids = ExpertIds(step_),
                  .weights = ws_.expert_weights,
                  .token_seq = step_.batch.token_seq},
                 slots, stream);
    });
    kernels::CudaExpertParams p =
        ExpertParams(ranks.num_data_ranks() * slots, step_.experts_prefill);
    p.num_experts = static_cast<int>(own.size());
    p.num_shared_tokens = step_.batch.num_tokens;
    p.shared_y = ranks.outputs();
    operators_.EnqueueBy(step_, "tokens of all ranks", [&] {
      ranks.Take({.from = {},
                  .first_expert = static_cast<int>(own.begin),
                  .num_experts = p.num_experts,
                  .first_group = (slots + 63) / 64 * 8,
                  .plan = p.plan,
                  .gathered = p.gathered},
                 slots, stream);
    });
    operators_.Enqueue(step_, "experts", p);
    operators_.EnqueueBy(step_, "outputs to their ranks", [&] {
      ranks.Return({.to = {}, .pair_of = p.plan.pair_of, .y = p.y}, slots, stream);
    });
    return {ranks.outputs(), ranks.pair_of(), c_.num_experts_per_token};
  }
};

}  // namespace

kernels::SublayerOutput EnqueueMoe(const CudaContext& context, const CudaLayer& layer) {
  return MoePass(context, layer).Run();
}

}  // namespace fathom::model
