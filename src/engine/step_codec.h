// How a step travels between nodes: its plan from node 0 to all others, its results back from the
// nodes that have some. Bytes as in comm/byte_codec.h, of one build, so without a version.
//
// A sequence that was in the step before is sent as what was added to it: both ends remember the
// sequences of the last plan, and no others, so that nothing has to be told when a request ends.
//
// What is decoded came from outside: every length, id and position is checked against the limits
// before anything is allocated or used. kPeer says what was wrong.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "comm/byte_codec.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/pool_plan.h"
#include "request/scheduled_batch.h"

namespace fathom::engine {

// What a step stays inside, the same on all nodes.
struct StepLimits {
  int num_data_ranks = 1;
  int vocab_size = 0;
  int max_num_seqs = 0;  // of a data rank, as the next two
  int max_num_batched_tokens = 0;
  int max_logits_rows = 0;
  int64_t max_model_len = 0;
  int sliding_window = 128;
  int experts_per_token = 0;  // of all layers together
  kv_cache::PoolSizes pools;
  kv_cache::HostSlots host;
  bool has_disk = false;
};

// The tokens that a grammar allows a sequence next: [ceil(vocab / 32)]. Empty: all.
using TokenMask = std::span<const uint32_t>;

// Node 0's end.
class PlanEncoder {
 public:
  // masks[d][i]: of batches[d].sequences[i], for data ranks that another node samples for; empty
  // for others.
  std::string Encode(std::span<const request::ScheduledBatch> batches,
                     std::span<const std::vector<TokenMask>> masks);

 private:
  struct Known {
    size_t num_tokens = 0;
    std::vector<int32_t> blocks;
  };
  void PutSequence(const request::ScheduledSequence& s, TokenMask mask, comm::ByteWriter& out);

  std::unordered_map<request::RequestId, Known> known_, next_;
};

// The others' end.
class PlanDecoder {
 public:
  explicit PlanDecoder(const StepLimits& limits);
  ~PlanDecoder();

  // One batch for each data rank; valid until the next Decode. No step can follow one that is
  // wrong.
  Result<std::span<const request::ScheduledBatch>> Decode(std::string_view bytes);

  // What is remembered of a sequence, and what its batch views.
  struct Sequence {
    request::Request request;
    std::vector<int32_t> token_ids;
    request::BlockTable table;
  };
  using Sequences = std::unordered_map<request::RequestId, std::unique_ptr<Sequence>>;

 private:
  const StepLimits limits_;
  Sequences known_;
  std::vector<request::ScheduledBatch> batches_;
};

// What a node tells after a step.
struct NodeReports {
  std::vector<size_t> result_ranks;  // the data ranks whose results it has
  std::vector<int> num_disk_ranks;   // by data rank: its ranks, whose disk it tells of; empty: none
  bool empty() const { return result_ranks.empty() && num_disk_ranks.empty(); }
};

// What a node's disk has been asked for, and has still to tell. For node 0.
class OpenStoreRequests {
 public:
  explicit OpenStoreRequests(const NodeReports& reports);

  // A step is on its way there.
  void Add(std::span<const request::ScheduledBatch> batches);
  // Completes what was told of a data rank; false when nobody asked for it.
  bool Take(size_t data_rank, request::KvStoreEvent& event);

 private:
  struct Open {
    request::KvStoreRequest request;
    int num_ranks = 0;  // that have not answered
  };
  const std::vector<int> num_ranks_;
  std::vector<int> num_indexing_;  // of the ranks
  std::map<std::tuple<size_t, request::KvRecord::Kind, int32_t>, Open> open_;
};

// What `reports` names, out of all in `results`.
std::string EncodeResults(const NodeReports& reports, std::span<const request::StepResult> results);

// The same, into `results`, whose other disks' news stay; `batches` are what was run, and what is
// found must fit them.
Status DecodeResults(std::string_view bytes, const StepLimits& limits, const NodeReports& reports,
                     std::span<const request::ScheduledBatch> batches, OpenStoreRequests& open,
                     std::span<request::StepResult> results);

}  // namespace fathom::engine
