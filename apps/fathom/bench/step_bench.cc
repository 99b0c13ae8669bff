#include "apps/fathom/bench/step_bench.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "apps/fathom/bench/report.h"
#include "base/check.h"
#include "device/timeline.h"
#include "model/dummy_kv_cache.h"

namespace fathom::app {
namespace {

// A window spans three pages, what a step writes and a rollback may reach four more.
constexpr int kPagesPerSeq = 8;

// Tokens of no meaning, different in every place of every sequence.
int32_t MadeUpToken(int seq, int64_t position, int vocab_size) {
  const uint64_t x =
      (static_cast<uint64_t>(seq) << 32 | static_cast<uint64_t>(position)) * 0x9e3779b97f4a7c15u;
  return static_cast<int32_t>((x >> 33) % static_cast<uint64_t>(vocab_size));
}

// Ranks run a step alike: operator by operator where one of them is watched.
struct Unwatched final : model::ChoiceRecorder {
  bool wants_choices() const override { return false; }
  bool wants_streams() const override { return false; }
  void OnRouting(int, int, std::span<const int32_t>) override {}
  void OnIndex(int, int, std::span<const int32_t>) override {}
};

}  // namespace

double MeanExperts(const ExpertCounts& counts) {
  if (counts.empty()) return 0;
  return std::accumulate(counts.begin(), counts.end(), 0.0) / static_cast<double>(counts.size());
}

std::vector<model::ProductCost> CostsOfRank(const ModelSession& session,
                                            const config::ModelConfig& config,
                                            const kv_cache::KvLayout& layout,
                                            model::StepShape shape) {
  const int64_t all_tokens = shape.own_tokens();
  const int data_ranks = session.parallel.data_parallel_size;
  for (int* const count : {&shape.num_seqs, &shape.logits_rows}) {
    *count = (*count + data_ranks - 1) / data_ranks;
  }
  shape.other_tokens = all_tokens - shape.own_tokens();
  config::ParallelConfig parallel = session.parallel;
  parallel.pipeline_parallel_size = 1;
  auto share = model::MakeRankShare(session.config, parallel, session.ranks.front().place);
  CHECK(share.ok());  // the session's model is split so
  config::ModelConfig& own = share->shard.config;
  own.num_layers = config.num_layers;
  own.compress_ratios = config.compress_ratios;
  own.draft = config.draft;
  own.num_draft_blocks = config.num_draft_blocks;
  return model::StepCosts(*share, layout, shape);
}

StepBench::StepBench(const ModelSession& session)
    : session_(session),
      layout_(kv_cache::MakeKvLayout(session.config, session.numerics, session.index_dtype)),
      threads_(session.ranks.size()),
      batches_(static_cast<size_t>(session.parallel.data_parallel_size)) {}

Result<std::unique_ptr<StepBench>> StepBench::Make(const ModelSession& session, int num_seqs,
                                                   int64_t max_tokens) {
  std::unique_ptr<StepBench> bench(new StepBench(session));
  bench->blocks_per_seq_ = max_tokens / kv_cache::kBlockTokens + 1;
  bench->pages_.assign(static_cast<size_t>(num_seqs), std::vector<int64_t>(kPagesPerSeq, -1));
  for (const SessionRank& rank : session.ranks) {
    ASSIGN_OR_RETURN(Pools pools, bench->AllocatePools(rank, num_seqs));
    bench->pools_.push_back(std::move(pools));
  }
  return bench;
}

Result<StepBench::Pools> StepBench::AllocatePools(const SessionRank& rank, int all_seqs) const {
  const int data_ranks = session_.parallel.data_parallel_size;
  const int num_seqs = (all_seqs + data_ranks - 1) / data_ranks;
  const int64_t num_blocks = num_seqs * blocks_per_seq_, num_pages = num_seqs * kPagesPerSeq;
  device::Device& device = *rank.device;
  Pools pools;
  pools.layout = kv_cache::MakeKvLayout(rank.config, session_.numerics, session_.index_dtype);
  ASSIGN_OR_RETURN(pools.blocks, device.Allocate(num_blocks * pools.layout.block_bytes));
  ASSIGN_OR_RETURN(pools.window_pages, device.Allocate(num_pages * pools.layout.window_page_bytes));
  ASSIGN_OR_RETURN(pools.state_slots, device.Allocate(num_seqs * pools.layout.state.slot_bytes));
  ASSIGN_OR_RETURN(pools.logits, device.Allocate(int64_t{session_.limits.max_num_seqs} *
                                                 session_.config.vocab_size * 4));
  ASSIGN_OR_RETURN(pools.stream, device.MakeStream());
  if (device.kind() == device::DeviceKind::kCpu) return pools;
  model::FillDummyKvCache(rank.config, pools.layout, session_.index_dtype, pools.kv(), num_blocks,
                          num_pages, *pools.stream);
  RETURN_IF_ERROR(pools.stream->Synchronize());
  return pools;
}

// The one thing in a state slot that must fit to the position (kv_cache/kv_layout.h).
Status StepBench::Rewind(int64_t context) {
  const auto position = static_cast<int32_t>(context);
  for (const Pools& pools : pools_) {
    for (size_t seq = 0; seq * num_data_ranks() < pages_.size(); ++seq) {
      std::byte* const slot =
          pools.state_slots.data() + static_cast<int64_t>(seq) * pools.layout.state.slot_bytes;
      for (const int64_t offset : pools.layout.snapshot.merged_ends) {
        RETURN_IF_ERROR(pools.stream->Copy(slot + offset, &position, sizeof(position)));
      }
    }
  }
  return Synchronize();
}

Status StepBench::Synchronize() {
  for (const Pools& pools : pools_) RETURN_IF_ERROR(pools.stream->Synchronize());
  for (const SessionRank& rank : session_.ranks) RETURN_IF_ERROR(rank.model->Health());
  return OkStatus();
}

// Tokens [begin, end) are run. Pages that the step reads keep their places.
request::BlockTable StepBench::Table(int seq, int64_t begin, int64_t end) {
  request::BlockTable table;
  const int own = seq / static_cast<int>(num_data_ranks());  // among those of its data rank
  for (int64_t i = 0; i <= (end - 1) / kv_cache::kBlockTokens; ++i) {
    table.blocks.push_back(static_cast<int32_t>(own * blocks_per_seq_ + i));
  }
  table.state_slot = own;
  const int window = session_.config.sliding_window;
  const int64_t first = std::max<int64_t>(0, begin - (window - 1)) / kv_cache::kWindowPageTokens;
  const int64_t last = (end - 1) / kv_cache::kWindowPageTokens;
  const int64_t written = std::max(begin, end - (window - 1 + kv_cache::kMaxRollbackTokens)) /
                          kv_cache::kWindowPageTokens;
  const int64_t read_end = begin == 0 ? 0 : (begin - 1) / kv_cache::kWindowPageTokens + 1;
  table.first_window_page = static_cast<int32_t>(first);
  std::vector<int64_t>& places = pages_[static_cast<size_t>(seq)];
  const auto wanted = [&](int64_t page) {
    return page >= first && page <= last && (page < read_end || page >= written);
  };
  for (int64_t& page : places) {
    if (!wanted(page)) page = -1;
  }
  for (int64_t page = first; page <= last; ++page) {
    auto place = std::find(places.begin(), places.end(), page);
    if (place == places.end() && wanted(page)) {
      place = std::find(places.begin(), places.end(), -1);
      CHECK(place != places.end());
      *place = page;
    }
    const int64_t index = own * kPagesPerSeq + (place - places.begin());
    table.window_pages.push_back(place == places.end() ? -1 : static_cast<int32_t>(index));
  }
  return table;
}

void StepBench::Prepare(const model::StepShape& shape, int first_seq) {
  for (runtime::DeviceBatch& batch : batches_) batch.Clear();
  data_rank_tokens_.assign(num_data_ranks(), 0);
  is_decode_ = shape.tokens_per_seq == 1;
  for (int s = first_seq; s < first_seq + shape.num_seqs; ++s) {
    tokens_.clear();
    for (int i = 0; i < shape.tokens_per_seq; ++i) {
      tokens_.push_back(MadeUpToken(s, shape.context_tokens + i, session_.config.vocab_size));
    }
    const int64_t end = shape.context_tokens + shape.tokens_per_seq;
    const size_t data_rank = static_cast<size_t>(s) % num_data_ranks();
    runtime::DeviceBatch& batch = batches_[data_rank];
    batch.AddSequence(tokens_, static_cast<int32_t>(shape.context_tokens),
                      Table(s, shape.context_tokens, end));
    batch.AddLogitsRow(tokens_.size() - 1);
    data_rank_tokens_[data_rank] += shape.tokens_per_seq;
  }
}

// What each rank runs.
std::vector<model::ForwardBatch> StepBench::Views() {
  std::vector<model::ForwardBatch> of_data_rank, views;
  for (runtime::DeviceBatch& batch : batches_) {
    model::ForwardBatch& view = of_data_rank.emplace_back(batch.View());
    if (num_data_ranks() == 1) continue;
    view.data_rank_tokens = data_rank_tokens_;
    view.data_ranks_decode = is_decode_;
  }
  for (const SessionRank& rank : session_.ranks) {
    views.push_back(of_data_rank[static_cast<size_t>(rank.place.data)]);
  }
  return views;
}

Status StepBench::ForwardOn(size_t rank, const model::ForwardBatch& batch,
                            model::ChoiceRecorder* recorder) {
  const Pools& pools = pools_[rank];
  return session_.ranks[rank].model->Forward(
      batch, pools.kv(), reinterpret_cast<float*>(pools.logits.data()), *pools.stream, recorder);
}

Status StepBench::Forward(model::ChoiceRecorder* recorder) {
  const std::vector<model::ForwardBatch> views = Views();
  return threads_.OnAll([&](size_t rank) {
    Unwatched unwatched;
    model::ChoiceRecorder* const own = recorder == nullptr || rank == 0 ? recorder : &unwatched;
    return ForwardOn(rank, views[rank], own);
  });
}

// Each stage tells those of its layers, each data rank those of its tokens.
Result<ExpertCounts> StepBench::CountExperts(const model::StepShape& shape, int first_seq) {
  Prepare(shape, first_seq);
  std::vector<model::ForwardBatch> views = Views();
  std::vector<std::vector<int32_t>> ids(views.size());
  for (size_t rank = 0; rank < views.size(); ++rank) {
    const SessionRank& own = session_.ranks[rank];
    if (own.place.tensor != session_.ranks.front().place.tensor) continue;
    ids[rank].resize(views[rank].token_ids.size() * static_cast<size_t>(own.config.num_layers) *
                     static_cast<size_t>(own.config.num_experts_per_token));
    views[rank].expert_ids = ids[rank];
  }
  RETURN_IF_ERROR(
      threads_.OnAll([&](size_t rank) { return ForwardOn(rank, views[rank], nullptr); }));
  RETURN_IF_ERROR(Synchronize());
  std::vector<std::set<int32_t>> chosen(static_cast<size_t>(session_.config.num_layers));
  size_t first_layer = 0;
  for (size_t rank = 0; rank < views.size(); ++rank) {
    const SessionRank& own = session_.ranks[rank];
    const auto num_layers = static_cast<size_t>(own.config.num_layers);
    const size_t per_layer = ids[rank].size() / num_layers;
    for (size_t i = 0; i < ids[rank].size(); ++i) {
      chosen[first_layer + i / per_layer].insert(ids[rank][i]);
    }
    const bool ends_stage =
        rank + 1 < views.size() && session_.ranks[rank + 1].place.pipeline != own.place.pipeline;
    if (ends_stage) first_layer += num_layers;
  }
  ExpertCounts counts;
  for (const auto& experts : chosen) counts.push_back(static_cast<int>(experts.size()));
  return counts;
}

Result<double> DecodeDeviceUs(StepBench& bench, int num_seqs, int64_t context) {
  constexpr int kSteps = 12;
  const auto timeline = device::MakeTimeline(device::DeviceKind::kCuda);
  const int64_t most = bench.session().limits.max_model_len;
  const int64_t contexts = std::min<int64_t>(4, most);
  const int64_t first = std::min(context / 4 * 4, most - contexts);
  double sum = 0;
  for (int64_t at = first; at < first + contexts; ++at) {
    RETURN_IF_ERROR(bench.Rewind(at));
    bench.Prepare({.num_seqs = num_seqs, .context_tokens = at, .logits_rows = num_seqs});
    for (int i = 0; i < kSteps; ++i) {
      RETURN_IF_ERROR(bench.Forward());
      timeline->Mark(bench.stream());
    }
    ASSIGN_OR_RETURN(const std::vector<double> times, timeline->Take());
    sum += Percentile(times, 0.5);
  }
  return sum / static_cast<double>(contexts);
}

}  // namespace fathom::app
