// ScheduledBatch and StepResult: the contract between scheduler and runtime, which never see each
// other. A batch is the immutable plan of one step; the result says what was sampled. Plain values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "request/kv_transfers.h"
#include "request/request.h"

namespace fathom::request {

// Where a sequence's KV lives, as ids into the pools that kv_cache/kv_layout.h lays out. Plain host
// data.
struct BlockTable {
  // [ceil(tokens / kBlockTokens)] history blocks: C4, C128 and index entries.
  std::vector<int32_t> blocks;
  // Window pages, newest last. Page i holds positions [(first_window_page + i) * kWindowPageTokens,
  // …).
  std::vector<int32_t> window_pages;
  int32_t first_window_page = 0;
  int32_t state_slot = -1;  // compressor state
};

// In the place of a token that the step before samples for the same request, when that step's
// result is not known yet.
inline constexpr int32_t kPendingToken = -1;

// One sequence's part of a step: run token_ids at positions num_computed_tokens.., and sample after
// the last of them when `sample` is set (a middle chunk of a prefill samples nothing). Only the
// last token may be pending, and only when it is the only one.
struct ScheduledSequence {
  RequestId request_id = 0;
  const Request* request = nullptr;    // alive while the batch is
  std::span<const int32_t> token_ids;  // [num_scheduled_tokens], a view of the sequence's tokens
  // Prompt and output so far: this step's tokens included, a pending one left out.
  std::span<const int32_t> all_token_ids;
  int32_t num_computed_tokens = 0;
  bool sample = false;
  BlockTable block_table;  // covers num_computed_tokens + token_ids.size()

  bool is_pending() const { return token_ids.back() == kPendingToken; }
  bool is_decode() const {
    return sample && token_ids.size() == 1 &&
           static_cast<size_t>(num_computed_tokens) >= request->prompt_token_ids.size();
  }
  // Tokens of the output so far, a pending one included, when `sample` is set.
  size_t num_output_tokens() const {
    return static_cast<size_t>(num_computed_tokens) + token_ids.size() -
           request->prompt_token_ids.size();
  }
};

struct ScheduledBatch {
  uint64_t step = 0;
  std::vector<ScheduledSequence> sequences;
  KvTransfers transfers = {};
  // The tokens of each data rank in this step; empty: there is one.
  std::vector<int32_t> data_rank_tokens = {};
  bool data_ranks_decode = false;  // all of them decode, or do nothing; false where there is one
  // A step may move memory only.
  bool empty() const { return sequences.empty() && transfers.empty(); }
  int num_tokens() const {
    size_t n = 0;
    for (const ScheduledSequence& s : sequences) n += s.token_ids.size();
    return static_cast<int>(n);
  }
};

// Tells each of several data ranks of a step what all of them do.
inline void TellDataRanks(std::span<ScheduledBatch> batches) {
  std::vector<int32_t> num_tokens;
  bool all_decode = true;
  for (const ScheduledBatch& batch : batches) {
    num_tokens.push_back(batch.num_tokens());
    for (const ScheduledSequence& s : batch.sequences) all_decode = all_decode && s.is_decode();
  }
  for (ScheduledBatch& batch : batches) {
    batch.data_rank_tokens = num_tokens;
    batch.data_ranks_decode = all_decode;
  }
}

struct SequenceResult {
  RequestId request_id = 0;
  std::vector<int32_t> sampled_token_ids;      // empty when nothing was sampled
  std::vector<TokenLogprobs> logprobs;         // one per sampled token when asked for
  std::vector<TokenLogprobs> prompt_logprobs;  // of this step's prompt tokens when asked for
  // Of this step's tokens when asked for: [tokens, layers, experts per token].
  std::vector<uint16_t> routed_experts;
  Status status;  // not OK: this request fails (NaN logits), others go on
};

struct StepResult {
  uint64_t step = 0;
  std::vector<SequenceResult> sequences;        // in the batch's order
  std::vector<KvStoreEvent> store_events = {};  // for PrefixCache::OnStoreEvents
};

}  // namespace fathom::request
