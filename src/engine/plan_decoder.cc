#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "engine/step_codec.h"
#include "engine/step_format.h"

namespace fathom::engine {
namespace {

using kv_cache::kBlockTokens;
using kv_cache::kWindowPageTokens;
using request::KvCopy;

// What node 0 found that a grammar allows.
class SentMask final : public request::TokenConstraint {
 public:
  SentMask(std::vector<uint32_t> words, int num_accepted)
      : words_(std::move(words)), num_accepted_(num_accepted) {}
  bool FillNextTokenMask(std::span<uint32_t> mask) override {
    std::copy(words_.begin(), words_.end(), mask.begin());
    return true;
  }
  bool AcceptToken(int32_t) override { return false; }
  void Rollback(int) override {}
  int num_accepted() const override { return num_accepted_; }

 private:
  const std::vector<uint32_t> words_;
  const int num_accepted_;
};

// Reads a plan. The first thing that is wrong is kept; after it all that is read is empty.
class PlanReader {
 public:
  PlanReader(std::string_view bytes, const StepLimits& limits, PlanDecoder::Sequences& known)
      : in_(bytes), limits_(limits), known_(known) {}

  void ReadBatch(request::ScheduledBatch& batch);
  Status Finish() {
    if (ok() && !in_.AtEnd()) Fail("it has more bytes than were expected");
    return status_;
  }
  bool ok() {
    if (!in_.ok()) Fail("it ends too early");
    return status_.ok();
  }
  PlanDecoder::Sequences TakeSequences() { return std::move(next_); }

 private:
  using Sequence = PlanDecoder::Sequence;

  void Fail(std::string_view what) {
    if (status_.ok())
      status_ = PeerError(fmt::format("node 0's plan of a step is wrong: {}", what));
  }
  // A value of [low, high].
  template <typename T>
  T Get(int64_t low, int64_t high, const char* what) {
    const T value = in_.Get<T>();
    if (ok() && !(value >= low && value <= high)) {
      Fail(fmt::format("{} is {}, not {} to {}", what, value, low, high));
    }
    return ok() ? value : static_cast<T>(low);
  }
  size_t GetCount(int64_t most, const char* what) {
    const auto count = Get<uint32_t>(0, most, what);
    return ok() ? count : 0;
  }
  // Ids below `end`, from `low` on, behind those that are there.
  void GetIds(int64_t most, int64_t low, int64_t end, const char* what, std::vector<int32_t>& ids) {
    const size_t count = GetCount(most, what);
    for (size_t i = 0; i < count && ok(); ++i) ids.push_back(Get<int32_t>(low, end - 1, what));
  }
  double GetNumber(double low, double high, const char* what) {
    const auto value = std::bit_cast<double>(in_.Get<uint64_t>());
    if (!(value >= low && value <= high)) Fail(fmt::format("{} is out of range", what));
    return value;
  }
  std::optional<int32_t> GetOptional(int64_t high, const char* what) {
    const bool has_value = Get<uint8_t>(0, 1, what) == 1;
    const int32_t value = Get<int32_t>(0, high, what);
    return has_value ? std::optional(value) : std::nullopt;
  }
  void ReadTokens(int64_t most, const char* what, std::vector<int32_t>& ids) {
    GetIds(most, 0, limits_.vocab_size, what, ids);
  }

  void ReadCopy(KvCopy& copy);
  void ReadStoreRequest(request::KvStoreRequest& r);
  void ReadSampling(request::SamplingParams& p);
  void ReadRequest(Sequence& sequence);
  void ReadTable(request::BlockTable& table);
  void CheckTable(const request::BlockTable& table, int64_t begin, int64_t end);
  void ReadMask(Sequence& sequence);
  std::unique_ptr<Sequence> TakeKnown(request::RequestId id);
  void ReadSequence(request::ScheduledBatch& batch);

  comm::ByteReader in_;
  const StepLimits& limits_;
  PlanDecoder::Sequences& known_;
  PlanDecoder::Sequences next_;
  Status status_;
  // Of the batch that is being read.
  int64_t num_tokens_ = 0;
  int64_t num_rows_ = 0;
};

void PlanReader::ReadCopy(KvCopy& copy) {
  const kv_cache::PoolSizes& pools = limits_.pools;
  const kv_cache::HostSlots& host = limits_.host;
  struct Ends {
    int32_t from;
    int32_t to;
  };
  // In KvCopy::Kind's order.
  const Ends ends[] = {{pools.num_blocks, pools.num_blocks},
                       {pools.num_window_pages, pools.num_window_pages},
                       {pools.num_state_slots, pools.num_state_slots},
                       {pools.num_state_slots, pools.num_snapshots},
                       {pools.num_snapshots, pools.num_state_slots},
                       {pools.num_blocks, host.num_blocks},
                       {host.num_blocks, pools.num_blocks},
                       {pools.num_snapshots, host.num_snapshots},
                       {host.num_snapshots, pools.num_state_slots}};
  const auto kind = Get<uint8_t>(0, static_cast<int64_t>(std::size(ends)) - 1, "a copy's kind");
  copy.kind = static_cast<KvCopy::Kind>(kind);
  copy.from = Get<int32_t>(0, ends[kind].from - 1, "a copy's source");
  copy.to = Get<int32_t>(0, ends[kind].to - 1, "a copy's destination");
  copy.position = Get<int32_t>(0, int64_t{pools.num_blocks} * kBlockTokens, "a copy's position");
  if (copy.position % kBlockTokens != 0) Fail("a copy's position is inside a block");
  GetIds(kv_cache::NumSnapshotPages(limits_.sliding_window), 0, pools.num_window_pages,
         "a copy's page", copy.pages);
}

void PlanReader::ReadStoreRequest(request::KvStoreRequest& r) {
  using Kind = request::KvStoreRequest::Kind;
  r.kind = static_cast<Kind>(Get<uint8_t>(0, 2, "what the disk is asked for"));
  if (ok() && !GetRecord(in_, limits_.vocab_size, r.record)) Fail("a record is none");
  const bool is_block = r.record.kind == request::KvRecord::Kind::kBlock;
  const int32_t num_slots = is_block ? limits_.host.num_blocks : limits_.host.num_snapshots;
  const bool is_delete = r.kind == Kind::kDelete;
  r.host_slot = Get<int32_t>(is_delete ? -1 : 0, is_delete ? -1 : num_slots - 1, "a record's slot");
}

void PlanReader::ReadSampling(request::SamplingParams& p) {
  constexpr double kMost = 1e6;
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
  const int64_t vocab_size = limits_.vocab_size;
  p.temperature = GetNumber(0, kMost, "temperature");
  p.top_p = GetNumber(0, 1, "top_p");
  p.min_p = GetNumber(0, 1, "min_p");
  p.presence_penalty = GetNumber(-kMost, kMost, "presence_penalty");
  p.frequency_penalty = GetNumber(-kMost, kMost, "frequency_penalty");
  p.repetition_penalty = GetNumber(1e-6, kMost, "repetition_penalty");
  p.top_k = Get<int32_t>(0, kMaxInt, "top_k");
  const size_t num_biases = GetCount(vocab_size, "the number of biases");
  for (size_t i = 0; i < num_biases && ok(); ++i) {
    const auto id = Get<int32_t>(0, vocab_size - 1, "a bias' token");
    p.logit_bias.emplace_back(id, std::bit_cast<float>(in_.Get<uint32_t>()));
    if (std::isnan(p.logit_bias.back().second)) Fail("a bias is not a number");
  }
  ReadTokens(vocab_size, "an allowed token", p.allowed_token_ids);
  const size_t num_words = GetCount(kMaxInt, "the number of bad words");
  for (size_t i = 0; i < num_words && ok(); ++i) {
    ReadTokens(limits_.max_model_len, "a bad word's token", p.bad_words.emplace_back());
    if (p.bad_words.back().empty()) Fail("a bad word has no tokens");
  }
  p.seed = in_.Get<uint64_t>();
  p.min_tokens = Get<int32_t>(0, kMaxInt, "min_tokens");
  p.ignore_eos = Get<uint8_t>(0, 1, "ignore_eos") == 1;
  GetIds(kMaxInt, std::numeric_limits<int32_t>::min(), kMaxInt, "a stop token", p.stop_token_ids);
  // More than there are tokens is as many as there are.
  p.num_logprobs = GetOptional(kMaxInt, "logprobs");
  p.num_prompt_logprobs = GetOptional(kMaxInt, "prompt_logprobs");
}

void PlanReader::ReadRequest(Sequence& sequence) {
  const auto num_known = static_cast<int64_t>(sequence.token_ids.size());
  const auto num_prompt_tokens = Get<uint32_t>(1, num_known, "the prompt's length");
  if (!ok()) return;
  request::Request& request = sequence.request;
  request.prompt_token_ids.assign(sequence.token_ids.begin(),
                                  sequence.token_ids.begin() + num_prompt_tokens);
  ReadSampling(request.sampling);
  request.routed_experts_start = GetOptional(limits_.max_model_len, "routed_experts_prompt_start");
}

void PlanReader::ReadTable(request::BlockTable& table) {
  const auto num_blocks = static_cast<int64_t>(table.blocks.size());
  table.blocks.resize(Get<uint32_t>(0, num_blocks, "the number of blocks that stay"));
  GetIds(kv_cache::NumBlocksFor(limits_.max_model_len + 1), 0, limits_.pools.num_blocks, "a block",
         table.blocks);
  table.first_window_page =
      Get<int32_t>(0, limits_.max_model_len / kWindowPageTokens, "the first window page");
  table.window_pages.clear();
  GetIds(kv_cache::MaxWindowPages(limits_.sliding_window, limits_.max_num_batched_tokens), -1,
         limits_.pools.num_window_pages, "a window page", table.window_pages);
  table.state_slot = Get<int32_t>(0, limits_.pools.num_state_slots - 1, "the state slot");
}

// A step over positions [begin, end) finds what it reads and writes (model/model.h).
void PlanReader::CheckTable(const request::BlockTable& table, int64_t begin, int64_t end) {
  if (static_cast<int64_t>(table.blocks.size()) < kv_cache::NumBlocksFor(end)) {
    return Fail("its blocks end before its tokens");
  }
  const int64_t reach = limits_.sliding_window - 1;
  const auto has_pages = [&](int64_t first, int64_t last) {  // of positions [first, last)
    for (int64_t page = std::max<int64_t>(first, 0) / kWindowPageTokens;
         page * kWindowPageTokens < last; ++page) {
      const int64_t i = page - table.first_window_page;
      if (i < 0 || i >= static_cast<int64_t>(table.window_pages.size()) ||
          table.window_pages[static_cast<size_t>(i)] < 0) {
        return false;
      }
    }
    return true;
  };
  const int64_t written = std::max(begin, end - reach - kv_cache::kMaxRollbackTokens);
  if (!has_pages(begin - reach, begin) || !has_pages(written, end)) {
    Fail("it lacks a window page");
  }
}

void PlanReader::ReadMask(Sequence& sequence) {
  const size_t num_output = sequence.token_ids.size() - sequence.request.prompt_token_ids.size();
  std::vector<uint32_t> words((static_cast<size_t>(limits_.vocab_size) + 31) / 32);
  for (uint32_t& word : words) word = in_.Get<uint32_t>();
  sequence.request.constraint =
      std::make_shared<SentMask>(std::move(words), static_cast<int>(num_output));
}

std::unique_ptr<PlanReader::Sequence> PlanReader::TakeKnown(request::RequestId id) {
  const auto it = known_.find(id);
  if (it == known_.end()) {
    Fail(fmt::format("request {} was not in the step before", id));
    return std::make_unique<Sequence>();
  }
  return std::move(known_.extract(it).mapped());
}

void PlanReader::ReadSequence(request::ScheduledBatch& batch) {
  const auto id = in_.Get<uint64_t>();
  const auto flags = Get<uint8_t>(0, kKnownSequence | kSamples | kHasMask, "a sequence's flags");
  const bool is_known = (flags & kKnownSequence) != 0, samples = (flags & kSamples) != 0;
  auto owned = is_known ? TakeKnown(id) : std::make_unique<Sequence>();
  Sequence& s = *owned;
  if (!next_.emplace(id, std::move(owned)).second) Fail(fmt::format("request {} is twice", id));
  if (!ok()) return;
  ReadTokens(limits_.max_model_len - static_cast<int64_t>(s.token_ids.size()), "a token",
             s.token_ids);
  if (!is_known) ReadRequest(s);
  const auto num_known = static_cast<int64_t>(s.token_ids.size());
  const auto begin = Get<int32_t>(0, num_known - 1, "the number of computed tokens");
  const int64_t most = std::min(limits_.max_num_batched_tokens - num_tokens_, num_known - begin);
  const auto count = Get<uint32_t>(1, most, "the number of tokens to run");
  const int64_t end = begin + int64_t{count};
  ReadTable(s.table);
  if (!ok()) return;
  CheckTable(s.table, begin, end);
  if (samples && end != num_known) Fail("a sequence samples before its end");
  s.request.id = id;
  s.request.constraint = nullptr;
  if ((flags & kHasMask) != 0) ReadMask(s);
  num_tokens_ += count;
  num_rows_ += s.request.sampling.num_prompt_logprobs ? int64_t{count} : int64_t{samples};
  if (num_rows_ > limits_.max_logits_rows) Fail("it asks for more rows of logits than there are");
  if (!ok()) return;
  const std::span<const int32_t> all(s.token_ids);
  batch.sequences.push_back({.request_id = id,
                             .request = &s.request,
                             .token_ids = all.subspan(static_cast<size_t>(begin), count),
                             .all_token_ids = all,
                             .num_computed_tokens = begin,
                             .sample = samples,
                             .block_table = s.table});
}

void PlanReader::ReadBatch(request::ScheduledBatch& batch) {
  num_tokens_ = num_rows_ = 0;
  batch.step = in_.Get<uint64_t>();
  const size_t num_copies = GetCount(std::numeric_limits<uint32_t>::max(), "the number of copies");
  for (size_t i = 0; i < num_copies && ok(); ++i) {
    ReadCopy(batch.transfers.copies.emplace_back());
  }
  const int64_t most_requests = limits_.has_disk ? std::numeric_limits<uint32_t>::max() : 0;
  batch.transfers.wait_for_store = Get<uint8_t>(0, limits_.has_disk, "waiting for the disk") == 1;
  const size_t num_requests = GetCount(most_requests, "the number of records");
  for (size_t i = 0; i < num_requests && ok(); ++i) {
    ReadStoreRequest(batch.transfers.store.emplace_back());
  }
  const size_t num_sequences = GetCount(limits_.max_num_seqs, "the number of sequences");
  for (size_t i = 0; i < num_sequences && ok(); ++i) ReadSequence(batch);
}

}  // namespace

PlanDecoder::PlanDecoder(const StepLimits& limits) : limits_(limits) {}
PlanDecoder::~PlanDecoder() = default;

Result<std::span<const request::ScheduledBatch>> PlanDecoder::Decode(std::string_view bytes) {
  batches_.assign(static_cast<size_t>(limits_.num_data_ranks), {});
  PlanReader reader(bytes, limits_, known_);
  for (request::ScheduledBatch& batch : batches_) reader.ReadBatch(batch);
  RETURN_IF_ERROR(reader.Finish());
  known_ = reader.TakeSequences();
  if (batches_.size() > 1) request::TellDataRanks(batches_);
  return std::span<const request::ScheduledBatch>(batches_);
}

}  // namespace fathom::engine
