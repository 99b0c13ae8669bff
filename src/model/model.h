// DeepSeekV4: one device's share of the model. Knows layers, not requests. Forward is called by one
// thread at a time (the worker's). Weights, workspace and KV cache are three lifetimes, owned
// separately.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "config/model_config.h"
#include "config/parallel_config.h"
#include "kv_cache/kv_layout.h"

namespace fathom::device {
class Device;
class Stream;
}  // namespace fathom::device

namespace fathom::comm {
class Transport;
}  // namespace fathom::comm

namespace fathom::model {

class Weights;

// One rank of those that run a model together. No transport: it is the only one.
struct ModelRank {
  config::ParallelConfig parallel;
  config::RankPlace place;
  comm::Transport* transport = nullptr;  // to all ranks; outlives the model
};

// Base addresses of the pools, in the memory of the model's device.
struct KvCacheView {
  std::byte* blocks = nullptr;        // [num_blocks, layout.block_bytes]
  std::byte* window_pages = nullptr;  // [num_window_pages, layout.window_page_bytes]
  std::byte* state_slots = nullptr;   // [num_state_slots, layout.state.slot_bytes]
};

// One step's flattened batch, host memory. S sequences, T tokens; sequence s owns tokens
// [cu_seqlens_q[s], cu_seqlens_q[s+1]), which stand at positions num_computed[s]...
// Block tables hold every block up to the last token. Window tables hold the pages of positions
// [num_computed - (sliding_window - 1), num_computed), which are read, and of the step's last
// sliding_window - 1 + kMaxRollbackTokens positions, which are written; pages between may be -1,
// and pages before first_window_page are left out. A step with num_computed 0 resets the state
// slot.
struct ForwardBatch {
  std::span<const int32_t> token_ids;  // [T]
  // On a GPU a token may be known there only: token t is sampled[token_sources[t]] where its source
  // is not -1. Empty: the host knows all.
  std::span<const int32_t> token_sources = {};  // [T]
  const int32_t* sampled = nullptr;             // device memory
  std::span<const int32_t> cu_seqlens_q;        // [S + 1]
  std::span<const int32_t> num_computed;        // [S]
  std::span<const int32_t> block_tables;        // [S, max_blocks], padded with -1
  int max_blocks = 0;
  std::span<const int32_t> window_tables;  // [S, max_window_pages], padded with -1
  int max_window_pages = 0;
  std::span<const int32_t> first_window_page;  // [S]
  std::span<const int32_t> state_slots;        // [S]
  std::span<const int32_t> logits_rows;        // token rows whose logits are wanted, ascending
  // Some are of a prompt. On a GPU a prompt's tokens have the same bits whatever the steps are; a
  // step of one token a sequence is one of decodes, unless this says otherwise.
  bool has_prompt = false;
  // How many tokens each data rank runs in this step, its own (T) among them: ranks that run none
  // take part in what all do together. Empty: there is one data rank.
  std::span<const int32_t> data_rank_tokens = {};
  // Each of them runs a step of decodes, or none. Otherwise experts run all tokens on a GPU as a
  // prompt's.
  bool data_ranks_decode = false;
  // Out: [num_layers, T, experts per token], ids ascending, there when the stream has been
  // synchronized; empty: not wanted.
  std::span<int32_t> expert_ids;

  // Of the data rank that runs most.
  int32_t most_tokens() const {
    auto most = static_cast<int32_t>(token_ids.size());
    for (const int32_t tokens : data_rank_tokens) most = tokens > most ? tokens : most;
    return most;
  }
};

// What a comparison with an oracle needs: the choices the model made. Expert ids and entries
// ascend. OnIndex is called for ratio-4 layers. Called on the thread of Forward. On a GPU a step
// with a recorder runs operator by operator, and what is recorded is copied to the host.
struct ChoiceRecorder {
  virtual ~ChoiceRecorder() = default;
  virtual bool wants_choices() const { return true; }
  virtual bool wants_streams() const { return true; }
  // On a GPU: the operator is enqueued next. Layer -1: it belongs to none. `name` is a literal.
  virtual void OnOperator(const char* /*name*/, int /*layer*/) {}
  virtual void OnRouting(int layer, int token_row, std::span<const int32_t> expert_ids) = 0;
  virtual void OnIndex(int layer, int token_row, std::span<const int32_t> entries) = 0;
  // The residual streams after the layer: [tokens, hc_mult, hidden] of the activation type.
  virtual void OnStreams(int /*layer*/, std::span<const std::byte> /*streams*/) {}
  // Choices to take instead of the model's own, [T, experts per token] and [T, index_topk] (padded
  // with -1), ascending; empty: its own. Asked of on a GPU only: a CPU chooses the same whatever
  // the chunk.
  virtual std::span<const int32_t> ForcedRouting(int /*layer*/) { return {}; }
  virtual std::span<const int32_t> ForcedIndex(int /*layer*/) { return {}; }
  // Residual streams to go on from after the layer, as OnStreams has the model's own, which are
  // told before; empty: its own. On a GPU only.
  virtual std::span<const std::byte> ForcedStreams(int /*layer*/) { return {}; }
};

struct ModelLimits {
  int max_batched_tokens = 0;
  int max_num_seqs = 0;
  int64_t max_model_len = 0;
};

class DeepSeekV4 {
 public:
  virtual ~DeepSeekV4() = default;

  // Runs the batch, updates the KV cache, and writes FP32 logits [logits_rows.size(), vocab_size]
  // to `logits` (device memory), which has room for max_num_seqs rows at least: on a GPU a step of
  // decodes is padded. There the work is enqueued and the batch may change on return. `recorder`
  // may be null. kPeer: another rank is gone, and this one can run nothing more; a broken device is
  // told by whoever waits for the stream.
  virtual Status Forward(const ForwardBatch& batch, const KvCacheView& kv, float* logits,
                         device::Stream& stream, ChoiceRecorder* recorder) = 0;

  // Makes ready what steps of decodes with these arguments (`sampled`: ForwardBatch's) would else
  // make when the first of their size comes, and runs nothing. Called before the first Forward;
  // with several ranks, by all at once. How many steps were captured; on a CPU there is nothing.
  virtual int CaptureDecodes(const KvCacheView& /*kv*/, float* /*logits*/,
                             const int32_t* /*sampled*/, device::Stream& /*stream*/) {
    return 0;
  }

  // kPeer: another rank was waited for in vain, and what the steps that have ended computed means
  // nothing. To be asked when a step's work has ended.
  virtual Status Health() { return OkStatus(); }

  // Of a device that broke, what it was doing: "attention of layer 3"; empty: it is not known.
  virtual std::string LastBegun() const { return {}; }
};

// The model of one rank: config and weights are those of its shard (checkpoint/shard.h).
Result<std::unique_ptr<DeepSeekV4>> MakeDeepSeekV4(
    const config::ModelConfig& config, config::Numerics numerics,
    kv_cache::IndexKeyDType index_dtype, std::shared_ptr<const Weights> weights,
    const ModelLimits& limits, device::Device& device, const ModelRank& rank = {});

}  // namespace fathom::model
