#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"
#include "engine/step_codec.h"
#include "engine/step_format.h"

namespace fathom::engine {
namespace {

void PutIds(std::span<const int32_t> ids, comm::ByteWriter& out) {
  out.Put(static_cast<uint32_t>(ids.size()));
  for (const int32_t id : ids) out.Put(id);
}

void PutOptional(const std::optional<int32_t>& value, comm::ByteWriter& out) {
  out.Put(static_cast<uint8_t>(value.has_value()));
  out.Put(value.value_or(0));
}

void PutSampling(const request::SamplingParams& p, comm::ByteWriter& out) {
  for (const double value : {p.temperature, p.top_p, p.min_p, p.presence_penalty,
                             p.frequency_penalty, p.repetition_penalty}) {
    out.Put(std::bit_cast<uint64_t>(value));
  }
  out.Put(int32_t{p.top_k});
  out.Put(static_cast<uint32_t>(p.logit_bias.size()));
  for (const auto& [id, bias] : p.logit_bias) {
    out.Put(id);
    out.Put(std::bit_cast<uint32_t>(bias));
  }
  PutIds(p.allowed_token_ids, out);
  out.Put(static_cast<uint32_t>(p.bad_words.size()));
  for (const auto& word : p.bad_words) PutIds(word, out);
  out.Put(p.seed);
  out.Put(int32_t{p.min_tokens});
  out.Put(static_cast<uint8_t>(p.ignore_eos));
  PutIds(p.stop_token_ids, out);
  PutOptional(p.num_logprobs, out);
  PutOptional(p.num_prompt_logprobs, out);
}

void PutCopy(const request::KvCopy& copy, comm::ByteWriter& out) {
  out.Put(static_cast<uint8_t>(copy.kind));
  out.Put(copy.from);
  out.Put(copy.to);
  out.Put(copy.position);
  PutIds(copy.pages, out);
}

void PutStoreRequest(const request::KvStoreRequest& r, comm::ByteWriter& out) {
  out.Put(static_cast<uint8_t>(r.kind));
  PutRecord(r.record, out);
  out.Put(r.host_slot);
}

size_t NumCommon(std::span<const int32_t> a, std::span<const int32_t> b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                             a.begin());
}

}  // namespace

std::string PlanEncoder::Encode(std::span<const request::ScheduledBatch> batches,
                                std::span<const std::vector<TokenMask>> masks) {
  comm::ByteWriter out;
  next_.clear();
  for (size_t d = 0; d < batches.size(); ++d) {
    const request::ScheduledBatch& batch = batches[d];
    out.Put(batch.step);
    out.Put(static_cast<uint32_t>(batch.transfers.copies.size()));
    for (const request::KvCopy& copy : batch.transfers.copies) PutCopy(copy, out);
    out.Put(static_cast<uint8_t>(batch.transfers.wait_for_store));
    out.Put(static_cast<uint32_t>(batch.transfers.store.size()));
    for (const request::KvStoreRequest& r : batch.transfers.store) PutStoreRequest(r, out);
    out.Put(static_cast<uint32_t>(batch.sequences.size()));
    for (size_t i = 0; i < batch.sequences.size(); ++i) {
      PutSequence(batch.sequences[i], masks[d].empty() ? TokenMask() : masks[d][i], out);
    }
  }
  std::swap(known_, next_);
  return out.Take();
}

void PlanEncoder::PutSequence(const request::ScheduledSequence& s, TokenMask mask,
                              comm::ByteWriter& out) {
  CHECK(!s.is_pending());
  const auto it = known_.find(s.request_id);
  const bool is_known = it != known_.end();
  Known known = is_known ? std::move(it->second) : Known();
  out.Put(s.request_id);
  out.Put(static_cast<uint8_t>((is_known ? kKnownSequence : 0) | (s.sample ? kSamples : 0) |
                               (mask.empty() ? 0 : kHasMask)));
  PutIds(s.all_token_ids.subspan(known.num_tokens), out);
  if (!is_known) {
    out.Put(static_cast<uint32_t>(s.request->prompt_token_ids.size()));
    PutSampling(s.request->sampling, out);
    PutOptional(s.request->routed_experts_start, out);
  }
  out.Put(s.num_computed_tokens);
  out.Put(static_cast<uint32_t>(s.token_ids.size()));
  const size_t num_kept = NumCommon(known.blocks, s.block_table.blocks);
  out.Put(static_cast<uint32_t>(num_kept));
  PutIds(std::span(s.block_table.blocks).subspan(num_kept), out);
  out.Put(s.block_table.first_window_page);
  PutIds(s.block_table.window_pages, out);
  out.Put(s.block_table.state_slot);
  for (const uint32_t word : mask) out.Put(word);
  known.num_tokens = s.all_token_ids.size();
  known.blocks.resize(num_kept);
  known.blocks.insert(known.blocks.end(),
                      s.block_table.blocks.begin() + static_cast<std::ptrdiff_t>(num_kept),
                      s.block_table.blocks.end());
  next_[s.request_id] = std::move(known);
}

}  // namespace fathom::engine
