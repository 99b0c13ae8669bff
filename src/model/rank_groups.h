// RankGroups: whom a rank talks to while the model runs, and what is said there. Used by the thread
// of Forward. A rank alone says nothing. kPeer: as comm::Transport.
#pragma once

#include <optional>
#include <span>

#include "comm/group.h"
#include "model/model.h"

namespace fathom::model {

class RankGroups {
 public:
  explicit RankGroups(const ModelRank& rank);

  // Values become the sum over the tensor ranks.
  template <typename T>
  Status SumOverTensorRanks(std::span<T> values) {
    return tensor_ ? tensor_->AllReduce(values) : OkStatus();
  }

  int data_rank() const { return place_.data; }
  int num_data_ranks() const { return parallel_.data_parallel_size; }
  // `values` holds rows_of[d] rows of `row_size` for every data rank d, one after the other. Own
  // rows become known to all data ranks, or become the sum over all ranks of the stage.
  template <typename T>
  Status GatherDataRanks(std::span<T> values, int64_t row_size, std::span<const int32_t> rows_of);
  template <typename T>
  Status SumOverStage(std::span<T> values, int64_t row_size, std::span<const int32_t> rows_of);

  // Every tensor rank's part [num_rows, its columns] of a matrix, to the whole at each of them.
  Status GatherColumns(std::span<const float> part, int64_t num_rows,
                       std::span<const comm::Group::Range> columns, float* whole);

  bool is_first_stage() const { return place_.pipeline == 0; }
  bool is_last_stage() const { return place_.pipeline == parallel_.pipeline_parallel_size - 1; }
  Status ReceiveFromStageBefore(std::span<std::byte> bytes);
  Status SendToStageAfter(std::span<const std::byte> bytes);

  int tensor_rank() const { return place_.tensor; }
  int num_tensor_ranks() const { return parallel_.tensor_parallel_size; }

 private:
  int RankOfStage(int stage) const;

  config::ParallelConfig parallel_;
  config::RankPlace place_;
  comm::Transport* transport_;
  std::optional<comm::Group> tensor_;  // none: alone in it
  std::optional<comm::Group> data_;
  std::optional<comm::Group> stage_;
  std::vector<float> parts_;
};

}  // namespace fathom::model
