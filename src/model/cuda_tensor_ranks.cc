#include "model/cuda_tensor_ranks.h"

#include <vector>

#include "base/check.h"
#include "checkpoint/shard.h"
#include "kernels/grouped_gemm/expert_plan.h"
#include "kernels/hyper_connection/boundary_large.h"
#include "model/token_shares.h"

namespace fathom::model {
namespace {

using Sent = kernels::OutputExchange::Sent;

constexpr int64_t kBlock = checkpoint::kQuantizedRows;  // columns under one scale
// From so many tokens of a prompt on, products write to all ranks: sending takes as long as they
// do.
constexpr int kMirroredTokens = 256;
// From so many tokens a rank on, what is gathered goes ahead, by copies: a launch more, and waits.
constexpr int kSentAheadTokens = 512;
// Of so many columns of wo_a's output, all ranks' together, and more, the output products are split
// by columns for the few rows that a rank of eight has of them.
constexpr int64_t kManyGroupedColumns = 16384;

// What each rank has of its share's tokens becomes everyone's: rows of so many values, one a token;
// and tiles of the same columns, so many bytes for 8 tokens.
template <typename Value>
kernels::GatheredMatrix SharedRows(Value* rows, int64_t values, const kernels::RankParts& shares,
                                   int size) {
  const int64_t bytes = kernels::kTileRows * values * static_cast<int64_t>(sizeof(Value));
  return kernels::GatheredRows(rows, bytes, bytes, shares, size);
}
kernels::GatheredMatrix SharedTiles(void* tiles, int64_t columns, int64_t bytes,
                                    const kernels::RankParts& shares, int size) {
  return kernels::GatheredColumns(tiles, columns, bytes, shares, size);
}

}  // namespace

CudaTensorRanks::CudaTensorRanks(const config::ModelConfig& config, const CudaWorkspace& workspace,
                                 comm::CudaCollectives* collectives, int64_t grouped_columns,
                                 bool has_whole_attention, bool has_whole_experts)
    : c_(config),
      ws_(workspace),
      collectives_(collectives),
      has_whole_attention_(has_whole_attention),
      has_whole_experts_(has_whole_experts) {
  CHECK(!has_whole_attention || !has_whole_experts);
  const int64_t blocks_of_group = config.o_lora_rank / kBlock;
  grouped_ = PartsOf(grouped_columns / config.o_lora_rank, 1, 1);
  for (int64_t& begin : grouped_.begin) begin *= blocks_of_group;
  intermediate_ = PartsOf(config.moe_intermediate_size, kBlock, kBlock);
  outputs_ = PartsOf(config.hidden_size, kBlock, 1);
  vocabulary_ = PartsOf(config.vocab_size, checkpoint::kVocabularyRows, 1);
  most_added_tokens_ = MostAddedTokens();
}

// Up to how many tokens each rank's columns of wo_b are a range of the tree in which one GPU adds
// up all of them.
int64_t CudaTensorRanks::MostAddedTokens() const {
  if (!has_whole_attention_ || (size() != 2 && size() != 4)) return 0;
  const int64_t blocks = grouped_.begin[size()];
  kernels::CudaGemmParams wo_b{.num_problems = 1, .num_tokens = 1, .few_rows = HaveFewRows()};
  wo_b.problems[0].w = {
      .kind = kernels::TileKind::kFp8, .rows = c_.hidden_size, .cols = blocks * kBlock};
  for (; wo_b.num_tokens <= collectives_->max_boundary_tokens(); ++wo_b.num_tokens) {
    const int parts = kernels::NumColumnParts(wo_b);
    if (parts % size() != 0 || blocks % parts != 0) break;
  }
  return grouped_.least(size()) == grouped_.most(size()) ? wo_b.num_tokens - 1 : 0;
}

const kernels::PeerExchange& CudaTensorRanks::BeginSums() {
  sums_ = collectives_->GatherInBoundary(outputs_, Sent::kSums);
  return sums_.exchange;
}

kernels::RouteInput CudaTensorRanks::RouteInput(const CudaStep& step, int layer,
                                                const CudaBlockWeights& w) const {
  const bool together = step.batch.num_tokens == 1 && AddsOutputs(step) &&
                        intermediate_.least(size()) > 0 && outputs_.least(size()) > 0;
  const bool alone = w.tid2eid == nullptr && kernels::RoutesAlone(c_.num_experts, c_.hidden_size) &&
                     kernels::AreExpertsAlone(1, c_.hidden_size, c_.moe_intermediate_size);
  if (!together || !alone || step.recorder != nullptr) return {};
  return {{ws_.route_input, {ws_.step_number, static_cast<uint32_t>(layer)}},
          w.ffn_norm,
          static_cast<float>(c_.rms_norm_eps)};
}

bool CudaTensorRanks::HaveFewRows() const {
  return grouped_.begin[size()] * kBlock >= kManyGroupedColumns;
}

// What each rank has of [0, total), cut at multiples of `unit`, counted in `each`.
kernels::RankParts CudaTensorRanks::PartsOf(int64_t total, int64_t unit, int64_t each) const {
  kernels::RankParts parts;
  for (int r = 0; r < size(); ++r) {
    parts.begin[r + 1] = checkpoint::Part(total, unit, r, size()).end / each;
  }
  return parts;
}

int64_t CudaTensorRanks::num_intermediate() const { return intermediate_.count(rank()) * kBlock; }

kernels::Fp8Tiles CudaTensorRanks::Own(const kernels::Fp8Tiles& tiles,
                                       const kernels::RankParts& blocks) const {
  const int64_t tiles_before = blocks.begin[rank()] * tiles.row_groups;
  return {tiles.codes + tiles_before * kernels::kTileBytes,
          tiles.scales + tiles_before * kernels::kTileRows, tiles.row_groups};
}

CudaStep CudaTensorRanks::ShareOf(const CudaStep& step) const {
  const int tokens = step.batch.num_tokens;
  const bool is_watched = step.recorder != nullptr &&
                          (step.recorder->wants_choices() || step.recorder->wants_streams());
  if (!has_whole_attention_ || !step.prefill || is_watched || !SharesTokens(tokens, size()) ||
      !collectives_->has_others()) {
    return step;
  }
  const kernels::RankParts shares = TokenShares(tokens, size());
  CudaStep share = step;
  share.first_token = static_cast<int>(shares.begin[rank()]);
  share.batch.num_tokens = static_cast<int>(shares.count(rank()));
  share.batch.token_seq += share.first_token;
  share.batch.positions += share.first_token;
  share.token_ids += share.first_token;
  share.token_sources += share.first_token;
  return share;
}

AttentionPart CudaTensorRanks::PartOf(const CudaStep& step, const CudaBlockWeights& w) const {
  const int64_t groups = w.wo_a.rows / c_.o_lora_rank, heads = w.wq_b.rows / c_.head_dim;
  if (!has_whole_attention_ || step.is_share()) {
    return {w.wq_b, w.wo_a, w.wo_b, w.sink, static_cast<int>(heads), static_cast<int>(groups)};
  }
  const int64_t first_group = grouped_.begin[rank()] * kBlock / c_.o_lora_rank;
  const int64_t first_head = first_group * (heads / groups);
  return {RowsOf(w.wq_b, first_head * c_.head_dim, int64_t{c_.num_heads} * c_.head_dim),
          RowsOf(w.wo_a, first_group * c_.o_lora_rank, int64_t{c_.o_groups} * c_.o_lora_rank),
          AddsOutputs(step) ? ColumnsOf(w.wo_b, first_group * c_.o_lora_rank,
                                        int64_t{c_.o_groups} * c_.o_lora_rank)
                            : RowsOf(w.wo_b, first_output(), num_outputs()),
          w.sink + first_head,
          c_.num_heads,
          c_.o_groups};
}

kernels::Mirrors CudaTensorRanks::MirrorsOf(const CudaStep& step) const {
  const bool many = step.prefill && step.batch.num_tokens >= kMirroredTokens;
  if (collectives_ == nullptr || !many || step.is_share()) return {};
  return collectives_->mirrors();
}

kernels::PeerView CudaTensorRanks::SelectingRanks(const CudaStep& step) const {
  const bool all_select = !step.prefill && grouped_.least(size()) > 0;
  return collectives_ != nullptr && all_select ? collectives_->peers() : kernels::PeerView{};
}

kernels::ExpertRank CudaTensorRanks::RankOfExperts(const CudaStep& step, bool are_large) {
  rows_ = {};
  if (collectives_ == nullptr || are_large) return {};
  const int64_t tokens = step.batch.num_tokens;
  const kernels::PeerExchange exchange =
      collectives_->GatherInExperts(tokens, intermediate_, outputs_);
  if (exchange.peers.size > 1 && tokens == 1) {
    rows_ = collectives_->GatherInBoundary(outputs_, Sent::kRows);
  }
  return {.exchange = exchange,
          .blocks = intermediate_,
          .down_rows = num_outputs(),
          .arrived = ws_.t_arrived,
          .outputs = rows_.exchange,
          .first_output = first_output()};
}

void CudaTensorRanks::Keep(const Status& status) {
  if (exchanged_.ok()) exchanged_ = status;
}

void CudaTensorRanks::Tell(const CudaStep& step, int layer, const char* name) const {
  if (step.recorder != nullptr) step.recorder->OnOperator(name, layer);
}

void CudaTensorRanks::AwaitMirrors(const CudaStep& step, int layer, const char* name) {
  Tell(step, layer, name);
  Keep(collectives_->Gather({}, *step.stream));
}

bool CudaTensorRanks::IsCompletedInBoundary(int64_t num_rows, int num_chosen, bool is_last) const {
  const int64_t most = collectives_->max_boundary_tokens();
  return num_rows <= most ||
         (most > 0 && !is_last &&
          kernels::LargeBoundaryExchanges(num_rows, c_.hidden_size, num_chosen));
}

kernels::OutputExchange CudaTensorRanks::CompleteOutput(const CudaStep& step, int layer,
                                                        int64_t num_rows, bool is_last,
                                                        kernels::SublayerOutput& output) {
  if (collectives_ == nullptr || output.y == nullptr) return {};
  const bool is_attention = output.pair_of == nullptr;
  if (step.is_share() && is_attention) return {};  // this rank's tokens are whole
  if (has_whole_experts_ && !is_attention) return {};
  if (!step.prefill) {
    if (is_attention && AddsOutputs(step)) return sums_;
    if (!is_attention && rows_.exchange.peers.size > 1) return rows_;
    if (IsCompletedInBoundary(num_rows, output.num_chosen, is_last)) {
      const kernels::OutputExchange gather =
          collectives_->GatherInBoundary(outputs_, Sent::kNothing);
      if (gather.exchange.peers.size > 1) return gather;
    }
  }
  if (MirrorsOf(step).count > 0 && is_attention) {
    AwaitMirrors(step, layer, "outputs of all ranks");
    return {};
  }
  Tell(step, layer, "outputs of all ranks");
  kernels::CudaGatherOutputParams params{.exchange = {},
                                         .output = output,
                                         .columns = outputs_,
                                         .num_tokens = step.total_tokens,
                                         .y = ws_.y};
  if (step.is_share()) params.tokens = TokenShares(step.total_tokens, size());
  Keep(collectives_->GatherOutput(params, *step.stream));
  output = {.y = ws_.y};
  return {};
}

void CudaTensorRanks::CompleteGroups(const CudaStep& step, int layer,
                                     const kernels::Fp8Tiles& grouped) {
  constexpr const char* kName = "groups of all ranks";
  if (collectives_ == nullptr || step.is_share() || AddsOutputs(step)) return;
  if (MirrorsOf(step).count > 0) return AwaitMirrors(step, layer, kName);
  Tell(step, layer, kName);
  GatherTiles(step, {.exchange = {},
                     .tiles = grouped,
                     .blocks = grouped_,
                     .num_tokens = step.batch.num_tokens,
                     .num_rows = step.batch.num_tokens});
}

void CudaTensorRanks::CompleteIntermediates(const CudaStep& step, int layer,
                                            const kernels::Fp8Tiles& t) {
  constexpr const char* kName = "intermediates of all ranks";
  if (collectives_ == nullptr) return;
  if (MirrorsOf(step).count > 0) return AwaitMirrors(step, layer, kName);
  Tell(step, layer, kName);
  const int64_t tokens = step.batch.num_tokens;
  GatherTiles(step,
              {.exchange = {},
               .tiles = t,
               .blocks = intermediate_,
               .num_tokens = tokens,
               .pair_of = ws_.plan.pair_of,
               .num_chosen = c_.num_experts_per_token,
               .num_rows = kernels::MaxPairRows(tokens, c_.num_experts, c_.num_experts_per_token)});
}

void CudaTensorRanks::GatherTiles(const CudaStep& step,
                                  const kernels::CudaGatherTilesParams& params) {
  Keep(collectives_->GatherTiles(params, *step.stream));
}

void CudaTensorRanks::CompleteLogits(const CudaStep& step) {
  if (collectives_ == nullptr) return;
  Tell(step, -1, "logits of all ranks");
  Keep(collectives_->GatherLogits({.exchange = {},
                                   .values = step.logits,
                                   .num_rows = step.num_logits_rows,
                                   .columns = vocabulary_},
                                  *step.stream));
}

void CudaTensorRanks::Gather(const CudaStep& share, int layer, const char* name,
                             std::span<const kernels::GatheredMatrix> matrices) {
  Tell(share, layer, name);
  Keep(collectives_->Gather(matrices, *share.stream));
}

kernels::RankParts CudaTensorRanks::SharesOf(const CudaStep& share) const {
  return RowGroupShares(share.total_tokens, TotalRowGroups(share), size());
}

std::vector<kernels::GatheredMatrix> CudaTensorRanks::KeysOf(const CudaStep& share,
                                                             const CudaBlockWeights& w) const {
  const kernels::RankParts shares = SharesOf(share);
  std::vector<kernels::GatheredMatrix> rows = {SharedRows(ws_.kv, c_.head_dim, shares, size())};
  const auto add = [&](float* compressed, const CudaCompressorWeights& weights) {
    if (weights.wkv.rows == 0) return;
    rows.push_back(SharedRows(compressed, 2 * weights.wkv.rows, shares, size()));
  };
  add(ws_.compressed, w.compressor);
  add(ws_.index_compressed, w.index_compressor);
  return rows;
}

std::vector<kernels::GatheredMatrix> CudaTensorRanks::InputOf(const CudaStep& share) const {
  constexpr int64_t kScaleBytes = kernels::kTileRows * sizeof(float);
  const kernels::RankParts shares = SharesOf(share);
  const int64_t blocks = c_.hidden_size / kBlock;
  return {SharedTiles(ws_.h_fp8, blocks, kernels::kTileBytes, shares, size()),
          SharedTiles(ws_.h_scales, blocks, kScaleBytes, shares, size())};
}

bool CudaTensorRanks::SendsAhead(const CudaStep& share) const {
  return share.is_share() && share.total_tokens >= kSentAheadTokens * size() &&
         collectives_->can_send_ahead();
}

void CudaTensorRanks::SendKeys(const CudaStep& share, const CudaBlockWeights& w) {
  collectives_->SendAhead(KeysOf(share, w), *share.stream);
}

void CudaTensorRanks::SendInput(const CudaStep& share) {
  collectives_->SendAhead(InputOf(share), *share.stream);
}

void CudaTensorRanks::GatherKeys(const CudaStep& share, int layer, const CudaBlockWeights& w) {
  std::vector<kernels::GatheredMatrix> rows;
  if (!SendsAhead(share)) rows = KeysOf(share, w);
  Gather(share, layer, "keys of all ranks", rows);
}

void CudaTensorRanks::GatherRouted(const CudaStep& share, int layer) {
  const kernels::RankParts shares = SharesOf(share);
  const int64_t chosen = c_.num_experts_per_token;
  int32_t* const ids = ws_.expert_ids + layer * TotalRowGroups(share) * kernels::kTileRows * chosen;
  std::vector<kernels::GatheredMatrix> routed;
  if (!SendsAhead(share)) routed = InputOf(share);
  routed.push_back(SharedRows(ids, chosen, shares, size()));
  routed.push_back(SharedRows(ws_.expert_weights, chosen, shares, size()));
  Gather(share, layer, "tokens of all ranks", routed);
}

void CudaTensorRanks::GatherStreams(const CudaStep& share) {
  const kernels::RankParts shares = SharesOf(share);
  const kernels::HyperConnectionState& state = ws_.ffn_state;
  const kernels::GatheredMatrix streams[] = {
      SharedRows(ws_.streams, 4 * int64_t{c_.hidden_size}, shares, size()),
      SharedRows(state.post, 4, shares, size()), SharedRows(state.comb_logits, 16, shares, size()),
      SharedRows(state.comb, 16, shares, size())};
  Gather(share, -1, "streams of all ranks", streams);
}

}  // namespace fathom::model
