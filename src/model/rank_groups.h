// RankGroups: whom a rank talks to while the model runs, and what is said there. No sums cross
// ranks: each computes some columns or rows of a matrix, and all complete it. Used by the thread of
// Forward. A rank alone says nothing. kPeer: as comm::Transport.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "checkpoint/shard.h"
#include "comm/group.h"
#include "model/model.h"

namespace fathom::model {

class RankGroups {
 public:
  explicit RankGroups(const ModelRank& rank);

  // Ranks that share something: those of a tensor group (the same sequences), of the data ranks
  // (the same place in them), or of the stage (all of both).
  enum class Who { kTensor, kData, kStage };
  int size(Who who) const;
  int rank(Who who) const;  // its own place among them

  // Its own part of [0, total), and everyone's.
  checkpoint::Range PartOf(Who who, int64_t total, int64_t unit) const {
    return checkpoint::Part(total, unit, rank(who), size(who));
  }
  std::vector<comm::Group::Range> PartsOf(Who who, int64_t total, int64_t unit) const;

  // Completes a matrix [num_rows, columns.back().end] of which each has its columns.
  template <typename T>
  Status GatherColumns(Who who, T* matrix, int64_t num_rows,
                       std::span<const comm::Group::Range> columns);
  // Completes a matrix of which each has its rows.
  template <typename T>
  Status GatherRows(Who who, T* matrix, int64_t row_size, std::span<const comm::Group::Range> rows);

  bool is_first_stage() const { return place_.pipeline == 0; }
  bool is_last_stage() const { return place_.pipeline == parallel_.pipeline_parallel_size - 1; }
  Status ReceiveFromStageBefore(std::span<std::byte> bytes);
  Status SendToStageAfter(std::span<const std::byte> bytes);

  bool has_whole_experts() const { return parallel_.enable_expert_parallel; }

 private:
  // Null: alone in it.
  comm::Group* Find(Who who);
  int RankOfStage(int stage) const;

  config::ParallelConfig parallel_;
  config::RankPlace place_;
  comm::Transport* transport_;
  std::optional<comm::Group> tensor_, data_, stage_;
  std::vector<std::byte> parts_;
};

}  // namespace fathom::model
