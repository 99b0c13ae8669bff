#include "runtime/testing/fake_model.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace fathom::runtime {
namespace {

using kv_cache::kBlockTokens;
using kv_cache::kWindowPageTokens;

constexpr int kWindow = 128;

// What a state slot holds.
struct SlotState {
  int32_t num_tokens = 0;
  int32_t num_prompt_tokens = 0;
};

// One sequence of a batch, with its place in the cache.
struct FakeSequence {
  const model::ForwardBatch& batch;
  const model::KvCacheView& kv;
  size_t index;

  int32_t* BlockEntry(int64_t position) const {
    const auto row = static_cast<int64_t>(index) * batch.max_blocks;
    CHECK_LT(position / kBlockTokens, batch.max_blocks);
    const int64_t id = batch.block_tables[static_cast<size_t>(row + position / kBlockTokens)];
    CHECK_GE(id, 0);
    return reinterpret_cast<int32_t*>(kv.blocks) + id * kBlockTokens + position % kBlockTokens;
  }

  int32_t* PageEntry(int64_t position) const {
    const auto row = static_cast<int64_t>(index) * batch.max_window_pages;
    const int64_t page = position / kWindowPageTokens - batch.first_window_page[index];
    CHECK(page >= 0 && page < batch.max_window_pages);
    const int64_t id = batch.window_tables[static_cast<size_t>(row + page)];
    CHECK_GE(id, 0);
    return reinterpret_cast<int32_t*>(kv.window_pages) + id * kWindowPageTokens +
           position % kWindowPageTokens;
  }

  SlotState& State() const {
    CHECK_GE(batch.state_slots[index], 0);
    return reinterpret_cast<SlotState*>(kv.state_slots)[batch.state_slots[index]];
  }
};

void ReportExperts(const model::ForwardBatch& batch) {
  if (batch.expert_ids.empty()) return;
  auto out = batch.expert_ids.begin();
  for (int layer = 0; layer < kFakeLayers; ++layer) {
    for (const int32_t token_id : batch.token_ids) {
      for (int i = 0; i < kFakeExpertsPerToken; ++i) {
        *out++ = (token_id % 100 * kFakeLayers + layer) * kFakeExpertsPerToken + i;
      }
    }
  }
  CHECK(out == batch.expert_ids.end());
}

}  // namespace

kv_cache::KvLayout FakeLayout() {
  kv_cache::KvLayout layout;
  layout.block_bytes = kBlockTokens * sizeof(int32_t);
  layout.window_page_bytes = kWindowPageTokens * sizeof(int32_t);
  layout.state.slot_bytes = sizeof(SlotState);
  layout.snapshot.ranges = {{.slot_offset = 0, .offset = 0, .bytes = sizeof(SlotState)}};
  layout.snapshot.bytes = sizeof(SlotState);
  return layout;
}

Status FakeModel::Forward(const model::ForwardBatch& batch, const model::KvCacheView& kv,
                          float* logits, device::Stream& /*stream*/,
                          model::ChoiceRecorder* /*recorder*/) {
  ++num_steps_;
  // All write before any reads, as the layers of a model do.
  for (size_t s = 0; s < batch.num_computed.size(); ++s) {
    const FakeSequence sequence{batch, kv, s};
    const int32_t begin = batch.cu_seqlens_q[s], end = batch.cu_seqlens_q[s + 1];
    const int32_t num_computed = batch.num_computed[s];
    SlotState& state = sequence.State();
    if (num_computed == 0) state = {};
    CHECK(num_computed <= state.num_tokens &&
          num_computed >= state.num_tokens - kv_cache::kMaxRollbackTokens);
    const bool taken_back = num_computed < state.num_tokens;
    state.num_tokens = num_computed;
    for (int32_t t = begin; t < end; ++t) {
      const int64_t position = num_computed + (t - begin);
      *sequence.BlockEntry(position) = batch.token_ids[static_cast<size_t>(t)];
      *sequence.PageEntry(position) = batch.token_ids[static_cast<size_t>(t)];
    }
    state.num_tokens += end - begin;
    if (num_computed == 0 || end - begin > 1 || taken_back) {
      state.num_prompt_tokens = state.num_tokens;
    }
  }
  size_t row = 0;
  for (size_t s = 0; s < batch.num_computed.size(); ++s) {
    const FakeSequence sequence{batch, kv, s};
    std::vector<int32_t> token_ids;
    for (int64_t p = 0; p < sequence.State().num_tokens; ++p) {
      token_ids.push_back(*sequence.BlockEntry(p));
    }
    for (int64_t p = std::max(0, batch.num_computed[s] - (kWindow - 1));
         p < sequence.State().num_tokens; ++p) {
      CHECK_EQ(*sequence.PageEntry(p), token_ids[static_cast<size_t>(p)]);
    }
    for (; row < batch.logits_rows.size() && batch.logits_rows[row] < batch.cu_seqlens_q[s + 1];
         ++row) {
      const auto length = static_cast<size_t>(batch.num_computed[s] + batch.logits_rows[row] -
                                              batch.cu_seqlens_q[s] + 1);
      script_(std::span(token_ids).first(length), sequence.State().num_prompt_tokens,
              {logits + row * static_cast<size_t>(vocab_size_), static_cast<size_t>(vocab_size_)});
    }
  }
  CHECK_EQ(row, batch.logits_rows.size());
  ReportExperts(batch);
  return OkStatus();
}

FakeModel::Script ReplyWith(
    std::function<std::vector<int32_t>(std::span<const int32_t> prompt)> reply,
    int32_t eos_token_id) {
  return
      [reply = std::move(reply), eos_token_id](std::span<const int32_t> token_ids,
                                               int64_t num_prompt_tokens, std::span<float> logits) {
        const auto num_prompt = std::min(static_cast<size_t>(num_prompt_tokens), token_ids.size());
        const std::vector<int32_t> tokens = reply(token_ids.first(num_prompt));
        const size_t output_idx = token_ids.size() - num_prompt;
        const int32_t next = output_idx < tokens.size() ? tokens[output_idx] : eos_token_id;
        std::fill(logits.begin(), logits.end(), 0.0f);
        logits[static_cast<size_t>(next)] = 1000.0f;
      };
}

}  // namespace fathom::runtime
