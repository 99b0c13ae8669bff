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

}  // namespace

double MeanExperts(const ExpertCounts& counts) {
  if (counts.empty()) return 0;
  return std::accumulate(counts.begin(), counts.end(), 0.0) / static_cast<double>(counts.size());
}

StepBench::StepBench(const ModelSession& session)
    : session_(session),
      layout_(kv_cache::MakeKvLayout(session.config, session.numerics, session.index_dtype)) {}

Result<std::unique_ptr<StepBench>> StepBench::Make(const ModelSession& session, int num_seqs,
                                                   int64_t max_tokens) {
  std::unique_ptr<StepBench> bench(new StepBench(session));
  RETURN_IF_ERROR(bench->AllocatePools(num_seqs, max_tokens));
  return bench;
}

Status StepBench::AllocatePools(int num_seqs, int64_t max_tokens) {
  device::Device& device = session_.device();
  blocks_per_seq_ = max_tokens / kv_cache::kBlockTokens + 1;
  pages_.assign(static_cast<size_t>(num_seqs), std::vector<int64_t>(kPagesPerSeq, -1));
  const int64_t num_blocks = num_seqs * blocks_per_seq_, num_pages = num_seqs * kPagesPerSeq;
  ASSIGN_OR_RETURN(blocks_, device.Allocate(num_blocks * layout_.block_bytes));
  ASSIGN_OR_RETURN(window_pages_, device.Allocate(num_pages * layout_.window_page_bytes));
  ASSIGN_OR_RETURN(state_slots_, device.Allocate(num_seqs * layout_.state.slot_bytes));
  ASSIGN_OR_RETURN(logits_, device.Allocate(int64_t{session_.limits.max_num_seqs} *
                                            session_.config.vocab_size * 4));
  ASSIGN_OR_RETURN(stream_, device.MakeStream());
  if (device.kind() == device::DeviceKind::kCpu) return OkStatus();
  model::FillDummyKvCache(session_.config, layout_, session_.index_dtype, kv(), num_blocks,
                          num_pages, *stream_);
  return stream_->Synchronize();
}

// The one thing in a state slot that must fit to the position (kv_cache/kv_layout.h).
Status StepBench::Rewind(int64_t context) {
  const auto position = static_cast<int32_t>(context);
  for (size_t seq = 0; seq < pages_.size(); ++seq) {
    std::byte* const slot =
        state_slots_.data() + static_cast<int64_t>(seq) * layout_.state.slot_bytes;
    for (const int64_t offset : layout_.snapshot.merged_ends) {
      RETURN_IF_ERROR(stream_->Copy(slot + offset, &position, sizeof(position)));
    }
  }
  return stream_->Synchronize();
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

Status StepBench::Forward(model::ChoiceRecorder* recorder) {
  return session_.model().Forward(batch_.View(), kv(), reinterpret_cast<float*>(logits_.data()),
                                  *stream_, recorder);
}

Result<ExpertCounts> StepBench::CountExperts(const model::StepShape& shape, int first_seq) {
  Prepare(shape, first_seq);
  const auto num_layers = static_cast<size_t>(session_.config.num_layers);
  const size_t per_layer = static_cast<size_t>(shape.num_seqs) *
                           static_cast<size_t>(shape.tokens_per_seq) *
                           static_cast<size_t>(session_.config.num_experts_per_token);
  std::vector<int32_t> ids(num_layers * per_layer);
  model::ForwardBatch batch = batch_.View();
  batch.expert_ids = ids;
  RETURN_IF_ERROR(session_.model().Forward(batch, kv(), reinterpret_cast<float*>(logits_.data()),
                                           *stream_, nullptr));
  RETURN_IF_ERROR(Synchronize());
  ExpertCounts counts;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    const auto* begin = ids.data() + layer * per_layer;
    counts.push_back(static_cast<int>(std::set<int32_t>(begin, begin + per_layer).size()));
  }
  return counts;
}

}  // namespace fathom::app
