// Sequence: the scheduler's mutable state of one request. Owned by the Scheduler; one thread (the
// engine's).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kv_cache/prefix_cache.h"
#include "request/request.h"
#include "scheduler/session_clocks.h"

namespace fathom::scheduler {

struct Sequence {
  request::Request request;
  uint64_t order = 0;  // of arrival; kept through preemptions

  std::vector<int32_t> token_ids;  // prompt, then output
  int64_t num_prompt_tokens = 0;
  int64_t num_computed_tokens = 0;  // their KV is in the cache
  int64_t num_in_flight = 0;        // after those, in the step whose result is not known yet
  int64_t num_pending = 0;          // tokens of the output that this step samples: 0 or 1
  int64_t num_preemptions = 0;
  bool finished = false;          // what a step in flight brings is dropped
  int64_t num_cached_tokens = 0;  // of the prompt, that its first admission found in the cache
  bool was_admitted = false;
  kv_cache::SequenceKv kv;

  std::shared_ptr<Session> session;
  // Of the session's clock: when an equal split of the device would have run the prompt.
  double finish_tag = 0;
  bool displaced_others = false;  // while it waits: once at most, so that nobody comes and goes

  // Of prompt tokens 1..; complete, and then moved out, with the first sampled token.
  std::vector<request::TokenLogprobs> prompt_logprobs;
  // Not told yet; and the token after those whose experts are known.
  std::vector<uint16_t> routed_experts;
  int64_t experts_end = 0;

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_output_tokens() const { return num_tokens() - num_prompt_tokens; }
  int64_t num_scheduled() const { return num_computed_tokens + num_in_flight; }
  int64_t num_remaining() const { return num_tokens() + num_pending - num_scheduled(); }
  // A decode has one token to run; anything else is a prefill, first or after a preemption.
  bool is_decode() const { return num_remaining() == 1; }
};

// Who keeps its memory: lower priority value, then earlier arrival. The first of those that run is
// never preempted for memory, so there is always one that gets on.
struct RunsBefore {
  bool operator()(const Sequence* a, const Sequence* b) const {
    if (a->request.priority != b->request.priority) {
      return a->request.priority < b->request.priority;
    }
    return a->order < b->order;
  }
};

// Whose prompt is run next: lower priority value, then fair queueing (session_clocks.h).
struct PrefillsBefore {
  bool operator()(const Sequence* a, const Sequence* b) const {
    if (a->request.priority != b->request.priority) {
      return a->request.priority < b->request.priority;
    }
    const double tag_a = std::max(a->finish_tag, a->session->virtual_seconds);
    const double tag_b = std::max(b->finish_tag, b->session->virtual_seconds);
    return tag_a != tag_b ? tag_a < tag_b : a->order < b->order;
  }
};

}  // namespace fathom::scheduler
