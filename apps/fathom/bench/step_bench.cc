#include "apps/fathom/bench/step_bench.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/check.h"
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
                                            const model::StepShape& shape) {
  auto share = model::MakeRankShare(session.config, session.parallel, session.ranks.front().place);
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
      threads_(session.ranks.size()) {}

Result<std::unique_ptr<StepBench>> StepBench::Make(const ModelSession& session, int num_seqs,
                                                   int64_t max_tokens) {
  std::unique_ptr<StepBench> bench(new StepBench(session));
  bench->blocks_per_seq_ = max_tokens / kv_cache::kBlockTokens + 1;
  bench->pages_.assign(static_cast<size_t>(num_seqs), std::vector<int64_t>(kPagesPerSeq, -1));
  for (const SessionRank& rank : session.ranks) {
    ASSIGN_OR_RETURN(Pools pools, bench->AllocatePools(*rank.device, num_seqs));
    bench->pools_.push_back(std::move(pools));
  }
  return bench;
}

Result<StepBench::Pools> StepBench::AllocatePools(device::Device& device, int num_seqs) const {
  const int64_t num_blocks = num_seqs * blocks_per_seq_, num_pages = num_seqs * kPagesPerSeq;
  Pools pools;
  ASSIGN_OR_RETURN(pools.blocks, device.Allocate(num_blocks * layout_.block_bytes));
  ASSIGN_OR_RETURN(pools.window_pages, device.Allocate(num_pages * layout_.window_page_bytes));
  ASSIGN_OR_RETURN(pools.state_slots, device.Allocate(num_seqs * layout_.state.slot_bytes));
  ASSIGN_OR_RETURN(pools.logits, device.Allocate(int64_t{session_.limits.max_num_seqs} *
                                                 session_.config.vocab_size * 4));
  ASSIGN_OR_RETURN(pools.stream, device.MakeStream());
  if (device.kind() == device::DeviceKind::kCpu) return pools;
  model::FillDummyKvCache(session_.config, layout_, session_.index_dtype, pools.kv(), num_blocks,
                          num_pages, *pools.stream);
  RETURN_IF_ERROR(pools.stream->Synchronize());
  return pools;
}

// The one thing in a state slot that must fit to the position (kv_cache/kv_layout.h).
Status StepBench::Rewind(int64_t context) {
  const auto position = static_cast<int32_t>(context);
  for (const Pools& pools : pools_) {
    for (size_t seq = 0; seq < pages_.size(); ++seq) {
      std::byte* const slot =
          pools.state_slots.data() + static_cast<int64_t>(seq) * layout_.state.slot_bytes;
      for (const int64_t offset : layout_.snapshot.merged_ends) {
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
  for (int64_t i = 0; i <= (end - 1) / kv_cache::kBlockTokens; ++i) {
    table.blocks.push_back(static_cast<int32_t>(seq * blocks_per_seq_ + i));
  }
  table.state_slot = seq;
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
    const int64_t index = seq * kPagesPerSeq + (place - places.begin());
    table.window_pages.push_back(place == places.end() ? -1 : static_cast<int32_t>(index));
  }
  return table;
}

void StepBench::Prepare(const model::StepShape& shape, int first_seq) {
  batch_.Clear();
  for (int s = first_seq; s < first_seq + shape.num_seqs; ++s) {
    tokens_.clear();
    for (int i = 0; i < shape.tokens_per_seq; ++i) {
      tokens_.push_back(MadeUpToken(s, shape.context_tokens + i, session_.config.vocab_size));
    }
    const int64_t end = shape.context_tokens + shape.tokens_per_seq;
    batch_.AddSequence(tokens_, static_cast<int32_t>(shape.context_tokens),
                       Table(s, shape.context_tokens, end));
    batch_.AddLogitsRow(tokens_.size() - 1);
  }
}

Status StepBench::ForwardOn(size_t rank, const model::ForwardBatch& batch,
                            model::ChoiceRecorder* recorder) {
  const Pools& pools = pools_[rank];
  return session_.ranks[rank].model->Forward(
      batch, pools.kv(), reinterpret_cast<float*>(pools.logits.data()), *pools.stream, recorder);
}

Status StepBench::Forward(model::ChoiceRecorder* recorder) {
  const model::ForwardBatch batch = batch_.View();
  return threads_.OnAll([&](size_t rank) {
    Unwatched unwatched;
    model::ChoiceRecorder* const own = recorder == nullptr || rank == 0 ? recorder : &unwatched;
    return ForwardOn(rank, batch, own);
  });
}

Result<ExpertCounts> StepBench::CountExperts(const model::StepShape& shape, int first_seq) {
  Prepare(shape, first_seq);
  const auto num_layers = static_cast<size_t>(session_.config.num_layers);
  const size_t per_layer = static_cast<size_t>(shape.num_seqs) *
                           static_cast<size_t>(shape.tokens_per_seq) *
                           static_cast<size_t>(session_.config.num_experts_per_token);
  std::vector<int32_t> ids(num_layers * per_layer);
  const model::ForwardBatch batch = batch_.View();
  RETURN_IF_ERROR(threads_.OnAll([&](size_t rank) {
    model::ForwardBatch own = batch;
    if (rank == 0) own.expert_ids = ids;
    return ForwardOn(rank, own, nullptr);
  }));
  RETURN_IF_ERROR(Synchronize());
  ExpertCounts counts;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    const auto* begin = ids.data() + layer * per_layer;
    counts.push_back(static_cast<int>(std::set<int32_t>(begin, begin + per_layer).size()));
  }
  return counts;
}

}  // namespace fathom::app
