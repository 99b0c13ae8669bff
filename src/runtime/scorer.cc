#include "runtime/scorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv_cache/pool_plan.h"

namespace fathom::runtime {

struct Scorer::Running {
  size_t sequence_idx = 0;
  std::span<const int32_t> token_ids;
  int64_t num_computed = 0;
  request::BlockTable table;
  int64_t num_left() const { return static_cast<int64_t>(token_ids.size()) - num_computed; }
};

Result<std::unique_ptr<Scorer>> Scorer::Make(const ScorerOptions& options,
                                             const kv_cache::KvLayout& layout,
                                             model::DeepSeekV4& model, device::Device& device) {
  const int64_t num_rows = int64_t{options.chunk_tokens} * options.num_seqs;
  if (options.chunk_tokens < 1 || options.num_seqs < 1 ||
      num_rows > options.limits.max_batched_tokens ||
      options.num_seqs > options.limits.max_num_seqs) {
    return InvalidArgument(fmt::format(
        "chunks of {} tokens of {} sequences do not fit into a step: it holds {} tokens of {} "
        "sequences",
        options.chunk_tokens, options.num_seqs, options.limits.max_batched_tokens,
        options.limits.max_num_seqs));
  }
  const kv_cache::PoolDemand demand{.max_num_seqs = options.num_seqs,
                                    .max_num_batched_tokens = static_cast<int>(num_rows),
                                    .max_model_len = options.max_model_len,
                                    .sliding_window = options.sliding_window};
  const int64_t useful_bytes = kv_cache::MaxUsefulBytes(layout, demand);
  const int64_t budget_bytes = options.kv_cache_bytes == 0 ? useful_bytes : options.kv_cache_bytes;
  ASSIGN_OR_RETURN(const auto sizes, kv_cache::PlanPools(layout, demand, budget_bytes));
  ASSIGN_OR_RETURN(auto kv_cache, KvCache::Make(layout, sizes, device));
  ASSIGN_OR_RETURN(auto stream, device.MakeStream());
  ASSIGN_OR_RETURN(auto logits,
                   LogitsBuffer::Make(static_cast<int>(num_rows), options.vocab_size, device));
  return std::unique_ptr<Scorer>(
      new Scorer(options, sizes, model, std::move(kv_cache), std::move(stream), std::move(logits)));
}

Scorer::Scorer(const ScorerOptions& options, const kv_cache::PoolSizes& sizes,
               model::DeepSeekV4& model, KvCache kv_cache, std::unique_ptr<device::Stream> stream,
               LogitsBuffer logits)
    : options_(options),
      pool_(sizes, options.sliding_window),
      model_(model),
      kv_cache_(std::move(kv_cache)),
      stream_(std::move(stream)),
      logits_(std::move(logits)) {}

Status Scorer::Validate(std::span<const std::vector<int32_t>> sequences) const {
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto length = static_cast<int64_t>(sequences[i].size());
    if (length < 1 || length > options_.max_model_len) {
      return InvalidArgument(fmt::format("sequence {} has {} tokens: it must have 1 to {}", i,
                                         length, options_.max_model_len));
    }
    for (const int32_t id : sequences[i]) {
      if (id < 0 || id >= options_.vocab_size) {
        return InvalidArgument(
            fmt::format("sequence {} has token id {}, which is not in the vocabulary of {}", i, id,
                        options_.vocab_size));
      }
    }
  }
  return OkStatus();
}

Status Scorer::Run(std::span<const std::vector<int32_t>> sequences, ScoreVisitor& visitor,
                   model::ChoiceRecorder* recorder) {
  RETURN_IF_ERROR(Validate(sequences));
  size_t next = 0;
  while (next < sequences.size()) {
    std::vector<Running> group;
    while (next < sequences.size() && static_cast<int>(group.size()) < options_.num_seqs) {
      Running r{.sequence_idx = next, .token_ids = sequences[next], .num_computed = 0, .table = {}};
      // A small pool takes fewer sequences at once than num_seqs.
      if (!pool_.Admit(static_cast<int64_t>(sequences[next].size()), r.table)) break;
      group.push_back(std::move(r));
      ++next;
    }
    CHECK(!group.empty());
    Status status;
    while (status.ok() && std::any_of(group.begin(), group.end(),
                                      [](const Running& r) { return r.num_left() > 0; })) {
      status = RunStep(group, visitor, recorder);
    }
    for (Running& r : group) pool_.Release(r.table);
    RETURN_IF_ERROR(status);
  }
  return OkStatus();
}

Status Scorer::RunStep(std::vector<Running>& group, ScoreVisitor& visitor,
                       model::ChoiceRecorder* recorder) {
  device_batch_.Clear();
  std::vector<TokenPlace> places;
  for (Running& r : group) {
    if (r.num_left() == 0) continue;
    const int64_t num_tokens = std::min<int64_t>(options_.chunk_tokens, r.num_left());
    pool_.Extend(r.table, r.num_computed, num_tokens);
    device_batch_.AddSequence(
        r.token_ids.subspan(static_cast<size_t>(r.num_computed), static_cast<size_t>(num_tokens)),
        static_cast<int32_t>(r.num_computed), r.table);
    for (int64_t i = 0; i < num_tokens; ++i) {
      device_batch_.AddLogitsRow(static_cast<size_t>(i));
      places.push_back({r.sequence_idx, r.num_computed + i});
    }
    r.num_computed += num_tokens;
  }
  visitor.OnStep(places);
  RETURN_IF_ERROR(model_.Forward(device_batch_.View(), kv_cache_.view(), logits_.device_data(),
                                 *stream_, recorder));
  RETURN_IF_ERROR(logits_.Fetch(0, places.size(), *stream_));
  for (Running& r : group) pool_.ReleaseUnreachable(r.table, r.num_computed);
  for (size_t i = 0; i < places.size(); ++i) visitor.OnLogits(places[i], logits_.row(i));
  return OkStatus();
}

}  // namespace fathom::runtime
