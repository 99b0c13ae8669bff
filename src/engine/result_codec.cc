#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "engine/step_codec.h"

namespace fathom::engine {
namespace {

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

}  // namespace

std::string EncodeResults(std::span<const size_t> ranks,
                          std::span<const request::StepResult> results) {
  comm::ByteWriter out;
  for (const size_t d : ranks) {
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
  return out.Take();
}

Status DecodeResults(std::string_view bytes, const StepLimits& limits,
                     std::span<const size_t> ranks,
                     std::span<const request::ScheduledBatch> batches,
                     std::span<request::StepResult> results) {
  comm::ByteReader in(bytes);
  const auto wrong = [](std::string_view what) {
    return PeerError(fmt::format("another node's result of a step is wrong: {}", what));
  };
  for (const size_t d : ranks) {
    request::StepResult result;
    result.step = in.Get<uint64_t>();
    if (result.step != batches[d].step) return wrong("it is of another step");
    for (const request::ScheduledSequence& s : batches[d].sequences) {
      const char* what = ReadSequence(s, limits, in, result.sequences.emplace_back());
      if (what != nullptr) return wrong(what);
    }
    results[d] = std::move(result);
  }
  return in.AtEnd() ? OkStatus() : wrong("it has another length than was expected");
}

}  // namespace fathom::engine
