// For tests of what travels between nodes: random steps that a scheduler could have planned, of
// sequences that come, go on, pause and end.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "engine/step_codec.h"

namespace fathom::engine {

inline StepLimits TestLimits() {
  return {
      .num_data_ranks = 2,
      .vocab_size = 70,
      .max_num_seqs = 3,
      .max_num_batched_tokens = 600,
      .max_logits_rows = 620,
      .max_model_len = 1500,
      .sliding_window = 128,
      .experts_per_token = 6,
      .pools = {.num_blocks = 20, .num_window_pages = 40, .num_state_slots = 5, .num_snapshots = 3},
      .host = {.num_blocks = 8, .num_snapshots = 2},
      .has_disk = true};
}

class RandomSteps {
 public:
  explicit RandomSteps(uint32_t seed) : random_(seed), sequences_(2) {}

  struct Step {
    std::vector<request::ScheduledBatch> batches;
    std::vector<std::vector<uint32_t>> words;  // of the masks
    std::vector<std::vector<TokenMask>> masks;
  };
  // Its batches view this object, until the next.
  const Step& Next() {
    step_ = {};
    for (size_t d = 0; d < sequences_.size(); ++d) AddBatch(d);
    request::TellDataRanks(step_.batches);
    return step_;
  }

 private:
  struct Sequence {
    request::Request request;
    std::vector<int32_t> token_ids;
    int64_t num_computed = 0;
    request::BlockTable table;
  };
  int64_t Below(int64_t end) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(end));
  }
  std::vector<int32_t> Ids(int64_t count, int64_t end) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int32_t& id : ids) id = static_cast<int32_t>(Below(end));
    return ids;
  }

  std::unique_ptr<Sequence> Arrive() {
    auto s = std::make_unique<Sequence>();
    request::Request& r = s->request;
    r.id = ++last_id_;
    r.prompt_token_ids = Ids(1 + Below(Below(3) == 0 ? 900 : 20), limits_.vocab_size);
    request::SamplingParams& p = r.sampling;
    p.temperature = static_cast<double>(Below(3)) / 2;
    p.top_p = 0.9;
    p.top_k = static_cast<int>(Below(5));
    p.repetition_penalty = 1 + static_cast<double>(Below(2));
    for (int64_t i = Below(3); i > 0; --i) {
      p.logit_bias.emplace_back(static_cast<int32_t>(i), -1.5f * static_cast<float>(i));
    }
    p.allowed_token_ids = Ids(Below(3), limits_.vocab_size);
    for (int64_t i = Below(3); i > 0; --i) p.bad_words.push_back(Ids(i, limits_.vocab_size));
    p.seed = random_();
    p.min_tokens = static_cast<int>(Below(4));
    p.ignore_eos = Below(2) == 0;
    p.stop_token_ids = Ids(Below(3), limits_.vocab_size);
    if (Below(3) == 0) p.num_logprobs = static_cast<int>(Below(4));
    if (Below(4) == 0) p.num_prompt_logprobs = static_cast<int>(Below(4));
    if (Below(4) == 0) r.routed_experts_start = 0;
    s->token_ids = r.prompt_token_ids;
    s->table.state_slot = static_cast<int32_t>(Below(limits_.pools.num_state_slots));
    return s;
  }

  void AddBatch(size_t d) {
    std::vector<std::unique_ptr<Sequence>>& sequences = sequences_[d];
    std::erase_if(sequences, [this](const auto&) { return Below(12) == 0; });
    while (sequences.size() < 3 && Below(3) != 0) sequences.push_back(Arrive());
    request::ScheduledBatch& batch = step_.batches.emplace_back();
    batch.step = ++num_steps_;
    std::vector<TokenMask>& masks = step_.masks.emplace_back();
    int64_t left = limits_.max_num_batched_tokens;
    for (const auto& s : sequences) {
      if (left == 0 || Below(6) == 0) continue;  // it pauses
      left -= Add(*s, left, batch);
      step_.words.emplace_back();
      if (batch.sequences.back().sample && Below(3) == 0) {
        step_.words.back() = {static_cast<uint32_t>(random_()), 7u,
                              static_cast<uint32_t>(Below(9))};
      }
      masks.push_back(step_.words.back());
    }
    if (Below(3) == 0) AddCopies(batch);
    if (Below(3) == 0) AddStoreRequests(batch);
  }

  int64_t Add(Sequence& s, int64_t most, request::ScheduledBatch& batch) {
    // What the step before sampled.
    if (s.num_computed == static_cast<int64_t>(s.token_ids.size())) {
      s.token_ids.push_back(static_cast<int32_t>(Below(limits_.vocab_size)));
    }
    const auto remaining = static_cast<int64_t>(s.token_ids.size()) - s.num_computed;
    const int64_t count = std::min({remaining, most, 1 + Below(600)});
    const int64_t begin = s.num_computed, end = begin + count;
    while (static_cast<int64_t>(s.table.blocks.size()) * kv_cache::kBlockTokens < end) {
      s.table.blocks.push_back(static_cast<int32_t>(Below(limits_.pools.num_blocks)));
    }
    s.table.first_window_page =
        static_cast<int32_t>(std::max<int64_t>(0, begin - 127) / kv_cache::kWindowPageTokens);
    s.table.window_pages.clear();
    for (int64_t page = s.table.first_window_page; page * kv_cache::kWindowPageTokens < end;
         ++page) {
      s.table.window_pages.push_back(static_cast<int32_t>(Below(limits_.pools.num_window_pages)));
    }
    const std::span<const int32_t> all(s.token_ids);
    batch.sequences.push_back(
        {.request_id = s.request.id,
         .request = &s.request,
         .token_ids = all.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)),
         .all_token_ids = all,
         .num_computed_tokens = static_cast<int32_t>(begin),
         .sample = count == remaining,
         .block_table = s.table});
    s.num_computed = end;
    return count;
  }

  void AddCopies(request::ScheduledBatch& batch) {
    using Kind = request::KvCopy::Kind;
    batch.transfers.copies = {
        {.kind = Kind::kBlock, .from = 19, .to = 0},
        {.kind = Kind::kSaveSnapshot, .from = 4, .to = 2, .position = 512},
        {.kind = Kind::kBlockToHost, .from = 3, .to = 7},
        {.kind = Kind::kSnapshotToHost, .from = 1, .to = 1, .position = 256, .pages = {5, 6}}};
  }

  void AddStoreRequests(request::ScheduledBatch& batch) {
    using Kind = request::KvStoreRequest::Kind;
    const request::KvRecord block{.kind = request::KvRecord::Kind::kBlock,
                                  .hash = {random_(), random_()},
                                  .parent = {random_(), 2},
                                  .num_tokens = 512,
                                  .token_ids = Ids(256, limits_.vocab_size)};
    const request::KvRecord snapshot{
        .kind = request::KvRecord::Kind::kSnapshot, .hash = {3, random_()}, .num_tokens = 256};
    batch.transfers.store = {
        {Kind::kRead, snapshot, 1}, {Kind::kWrite, block, 7}, {Kind::kDelete, block, -1}};
    batch.transfers.wait_for_store = batch.sequences.empty();
  }

  std::mt19937 random_;
  const StepLimits limits_ = TestLimits();
  std::vector<std::vector<std::unique_ptr<Sequence>>> sequences_;  // of each data rank
  uint64_t last_id_ = 0;
  uint64_t num_steps_ = 0;
  Step step_;
};

// Results that a step could have.
inline std::vector<request::StepResult> RandomResults(
    std::span<const request::ScheduledBatch> batches, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<request::StepResult> results;
  for (const request::ScheduledBatch& batch : batches) {
    request::StepResult& result = results.emplace_back();
    result.step = batch.step;
    for (const request::ScheduledSequence& s : batch.sequences) {
      request::SequenceResult& r = result.sequences.emplace_back();
      r.request_id = s.request_id;
      if (random() % 8 == 0) {
        r.status = InternalError("logits that are not finite");
        continue;
      }
      if (s.sample) r.sampled_token_ids = {static_cast<int32_t>(random() % 70)};
      if (s.sample && s.request->sampling.num_logprobs) {
        r.logprobs = {{.chosen = {1, -0.5f}, .rank = 3, .top = {{2, -0.25f}, {3, -0.375f}}}};
      }
      if (s.request->routed_experts_start) r.routed_experts.assign(s.token_ids.size() * 6, 7);
      if (s.request->sampling.num_prompt_logprobs) {
        r.prompt_logprobs.resize(s.token_ids.size(), {.chosen = {4, -2.0f}, .rank = 1, .top = {}});
      }
    }
  }
  return results;
}

}  // namespace fathom::engine
