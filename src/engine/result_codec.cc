#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "engine/step_codec.h"
#include "engine/step_format.h"

namespace fathom::engine {
namespace {

using request::KvStoreEvent;
using request::KvStoreRequest;
using request::TokenLogprob;
using request::TokenLogprobs;

void PutLogprob(const TokenLogprob& logprob, comm::ByteWriter& out) {
  out.Put(logprob.token_id);
  out.Put(std::bit_cast<uint32_t>(logprob.logprob));
}

void PutLogprobs(std::span<const TokenLogprobs> tokens, comm::ByteWriter& out) {
  out.Put(static_cast<uint32_t>(tokens.size()));
  for (const TokenLogprobs& token : tokens) {
    PutLogprob(token.chosen, out);
    out.Put(int32_t{token.rank});
    out.Put(static_cast<uint32_t>(token.top.size()));
    for (const TokenLogprob& top : token.top) PutLogprob(top, out);
  }
}

TokenLogprob GetLogprob(comm::ByteReader& in) {
  const auto token_id = in.Get<int32_t>();
  return {.token_id = token_id, .logprob = std::bit_cast<float>(in.Get<uint32_t>())};
}

// False when there are more than `most`, or more than a vocabulary of best ones.
bool GetLogprobs(size_t most, const StepLimits& limits, comm::ByteReader& in,
                 std::vector<TokenLogprobs>& tokens) {
  const size_t count = in.Get<uint32_t>();
  if (count > most) return false;
  for (size_t i = 0; i < count && in.ok(); ++i) {
    TokenLogprobs& token = tokens.emplace_back();
    token.chosen = GetLogprob(in);
    token.rank = in.Get<int32_t>();
    const size_t num_top = in.Get<uint32_t>();
    if (num_top > static_cast<size_t>(limits.vocab_size)) return false;
    for (size_t t = 0; t < num_top && in.ok(); ++t) token.top.push_back(GetLogprob(in));
  }
  return in.ok();
}

constexpr size_t kMaxMessage = 4096;

bool GetStatus(comm::ByteReader& in, Status& status) {
  const auto code = in.Get<uint8_t>();
  std::string message = in.GetString(kMaxMessage);
  if (!in.ok() || code > static_cast<uint8_t>(StatusCode::kCancelled)) return false;
  if (code != 0) status = Status(static_cast<StatusCode>(code), std::move(message));
  return true;
}

// What is wrong with it; null: nothing.
const char* ReadSequence(const request::ScheduledSequence& s, const StepLimits& limits,
                         comm::ByteReader& in, request::SequenceResult& result) {
  result.request_id = in.Get<uint64_t>();
  if (result.request_id != s.request_id) return "it is of another request";
  if (!GetStatus(in, result.status)) return "its status is none";
  const size_t num_sampled = in.Get<uint8_t>();
  if (num_sampled != (s.sample && result.status.ok() ? 1u : 0u)) return "its tokens are too many";
  for (size_t i = 0; i < num_sampled; ++i) {
    const auto token_id = in.Get<int32_t>();
    if (token_id < 0 || token_id >= limits.vocab_size) return "its token is none";
    result.sampled_token_ids.push_back(token_id);
  }
  if (!GetLogprobs(num_sampled, limits, in, result.logprobs)) return "its log-probabilities";
  if (!GetLogprobs(s.token_ids.size(), limits, in, result.prompt_logprobs)) {
    return "its prompt's log-probabilities";
  }
  const size_t num_experts = in.Get<uint32_t>();
  const size_t num_asked = s.request->routed_experts_start
                               ? s.token_ids.size() * static_cast<size_t>(limits.experts_per_token)
                               : 0;
  // One that fails may have none.
  const bool has_none = num_experts == 0 && !result.status.ok();
  if (num_experts != num_asked && !has_none) return "its experts are too many or too few";
  for (size_t i = 0; i < num_experts && in.ok(); ++i) {
    result.routed_experts.push_back(in.Get<uint16_t>());
  }
  return in.ok() ? nullptr : "it ends too early";
}

bool IsAnswer(KvStoreEvent::Kind kind) {
  return kind == KvStoreEvent::Kind::kRead || kind == KvStoreEvent::Kind::kWrite;
}

// Who gets an answer knows its record.
void PutStoreEvent(const KvStoreEvent& event, comm::ByteWriter& out) {
  out.Put(static_cast<uint8_t>(event.kind));
  out.Put(event.num_ranks);
  out.Put(event.file_bytes);
  if (event.kind == KvStoreEvent::Kind::kFound) PutRecord(event.record, out);
  if (!IsAnswer(event.kind)) return;
  out.Put(static_cast<uint8_t>(event.record.kind));
  out.Put(event.host_slot);
  out.Put(static_cast<uint8_t>(event.ok));
}

// False when it is none.
bool GetStoreEvent(const StepLimits& limits, comm::ByteReader& in, KvStoreEvent& event) {
  constexpr int64_t kMostBytes = int64_t{1} << 40;
  const auto kind = in.Get<uint8_t>();
  event.kind = static_cast<KvStoreEvent::Kind>(kind);
  event.num_ranks = in.Get<int32_t>();
  event.file_bytes = in.Get<int64_t>();
  if (!in.ok() || kind > static_cast<uint8_t>(KvStoreEvent::Kind::kOff) || event.file_bytes < 0 ||
      event.file_bytes > kMostBytes) {
    return false;
  }
  if (event.kind == KvStoreEvent::Kind::kFound) {
    return GetRecord(in, limits.vocab_size, event.record);
  }
  if (!IsAnswer(event.kind)) return true;
  event.record.kind = static_cast<request::KvRecord::Kind>(in.Get<uint8_t>());
  event.host_slot = in.Get<int32_t>();
  event.ok = in.Get<uint8_t>() == 1;
  return in.ok();
}

}  // namespace

OpenStoreRequests::OpenStoreRequests(const NodeReports& reports)
    : num_ranks_(reports.num_disk_ranks), num_indexing_(reports.num_disk_ranks) {}

void OpenStoreRequests::Add(std::span<const request::ScheduledBatch> batches) {
  for (size_t d = 0; d < num_ranks_.size(); ++d) {
    for (const KvStoreRequest& r : batches[d].transfers.store) {
      if (num_ranks_[d] == 0 || r.kind == KvStoreRequest::Kind::kDelete) continue;
      open_[{d, r.record.kind, r.host_slot}] = {.request = r, .num_ranks = num_ranks_[d]};
    }
  }
}

bool OpenStoreRequests::Take(size_t data_rank, KvStoreEvent& event) {
  if (event.num_ranks < 1 || event.num_ranks > num_ranks_[data_rank]) return false;
  if (event.kind == KvStoreEvent::Kind::kIndexed) {
    return (num_indexing_[data_rank] -= event.num_ranks) >= 0;
  }
  if (!IsAnswer(event.kind)) return true;
  const auto it = open_.find({data_rank, event.record.kind, event.host_slot});
  if (it == open_.end()) return false;
  Open& open = it->second;
  const bool is_read = open.request.kind == KvStoreRequest::Kind::kRead;
  if (is_read != (event.kind == KvStoreEvent::Kind::kRead)) return false;
  event.record = open.request.record;
  open.num_ranks -= event.num_ranks;
  const bool is_asked = open.num_ranks >= 0;
  if (open.num_ranks <= 0) open_.erase(it);
  return is_asked;
}

std::string EncodeResults(const NodeReports& reports,
                          std::span<const request::StepResult> results) {
  comm::ByteWriter out;
  for (const size_t d : reports.result_ranks) {
    out.Put(results[d].step);
    for (const request::SequenceResult& s : results[d].sequences) {
      out.Put(s.request_id);
      out.Put(static_cast<uint8_t>(s.status.code()));
      out.PutString(std::string_view(s.status.message()).substr(0, kMaxMessage));
      // What was chosen by a sequence that fails is dropped.
      const size_t num_sampled = s.status.ok() ? s.sampled_token_ids.size() : 0;
      out.Put(static_cast<uint8_t>(num_sampled));
      for (size_t i = 0; i < num_sampled; ++i) out.Put(s.sampled_token_ids[i]);
      PutLogprobs(std::span(s.logprobs).first(std::min(num_sampled, s.logprobs.size())), out);
      PutLogprobs(s.prompt_logprobs, out);
      out.Put(static_cast<uint32_t>(s.routed_experts.size()));
      for (const uint16_t id : s.routed_experts) out.Put(id);
    }
  }
  for (size_t d = 0; d < reports.num_disk_ranks.size(); ++d) {
    out.Put(static_cast<uint32_t>(results[d].store_events.size()));
    for (const KvStoreEvent& event : results[d].store_events) PutStoreEvent(event, out);
  }
  return out.Take();
}

Status DecodeResults(std::string_view bytes, const StepLimits& limits, const NodeReports& reports,
                     std::span<const request::ScheduledBatch> batches, OpenStoreRequests& open,
                     std::span<request::StepResult> results) {
  comm::ByteReader in(bytes);
  const auto wrong = [](std::string_view what) {
    return PeerError(fmt::format("another node's result of a step is wrong: {}", what));
  };
  for (const size_t d : reports.result_ranks) {
    request::StepResult result;
    result.store_events = std::move(results[d].store_events);
    result.step = in.Get<uint64_t>();
    if (result.step != batches[d].step) return wrong("it is of another step");
    for (const request::ScheduledSequence& s : batches[d].sequences) {
      const char* what = ReadSequence(s, limits, in, result.sequences.emplace_back());
      if (what != nullptr) return wrong(what);
    }
    results[d] = std::move(result);
  }
  for (size_t d = 0; d < reports.num_disk_ranks.size(); ++d) {
    const size_t num_events = in.Get<uint32_t>();
    for (size_t i = 0; i < num_events && in.ok(); ++i) {
      KvStoreEvent event;
      if (!GetStoreEvent(limits, in, event) || !open.Take(d, event))
        return wrong("its disk's news");
      results[d].store_events.push_back(std::move(event));
    }
  }
  return in.AtEnd() ? OkStatus() : wrong("it has another length than was expected");
}

}  // namespace fathom::engine
