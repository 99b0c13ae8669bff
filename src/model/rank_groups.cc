#include "model/rank_groups.h"

#include <algorithm>

#include "base/check.h"
#include "base/float_types.h"

namespace fathom::model {
namespace {

using comm::Group;
using config::RankPlace;

// Where each data rank's rows are.
std::vector<Group::Range> RangesOf(std::span<const int32_t> rows_of, int64_t row_bytes) {
  std::vector<Group::Range> ranges;
  int64_t end = 0;
  for (const int32_t rows : rows_of) {
    const int64_t begin = end;
    end += rows * row_bytes;
    ranges.push_back({begin, end});
  }
  return ranges;
}

}  // namespace

RankGroups::RankGroups(const ModelRank& rank)
    : parallel_(rank.parallel), place_(rank.place), transport_(rank.transport) {
  if (transport_ == nullptr) {
    CHECK_EQ(parallel_.world_size(), 1);
    return;
  }
  std::vector<int> tensor, data, stage;
  for (int d = 0; d < parallel_.data_parallel_size; ++d) {
    data.push_back(RankOf(parallel_, {place_.tensor, d, place_.pipeline}));
    for (int t = 0; t < parallel_.tensor_parallel_size; ++t) {
      stage.push_back(RankOf(parallel_, {t, d, place_.pipeline}));
      if (d == place_.data) tensor.push_back(stage.back());
    }
  }
  if (tensor.size() > 1) tensor_.emplace(*transport_, tensor);
  if (data.size() > 1) data_.emplace(*transport_, data);
  if (stage.size() > 1) stage_.emplace(*transport_, stage);
}

template <typename T>
Status RankGroups::GatherDataRanks(std::span<T> values, int64_t row_size,
                                   std::span<const int32_t> rows_of) {
  if (!data_) return OkStatus();
  const int64_t row_bytes = row_size * static_cast<int64_t>(sizeof(T));
  return data_->AllGather(std::as_writable_bytes(values), RangesOf(rows_of, row_bytes));
}

template <typename T>
Status RankGroups::SumOverStage(std::span<T> values, int64_t row_size,
                                std::span<const int32_t> rows_of) {
  if (!stage_) return OkStatus();
  std::vector<Group::Range> ranges;
  for (const Group::Range& range : RangesOf(rows_of, row_size)) {
    ranges.insert(ranges.end(), static_cast<size_t>(num_tensor_ranks()), range);
  }
  return stage_->ReduceScatter(values, ranges);
}

Status RankGroups::GatherColumns(std::span<const float> part, int64_t num_rows,
                                 std::span<const Group::Range> columns, float* whole) {
  CHECK(tensor_.has_value());
  const int64_t width = columns.back().end;
  parts_.resize(static_cast<size_t>(num_rows * width));
  std::vector<Group::Range> bytes;
  for (const Group::Range& range : columns) {
    bytes.push_back({range.begin * num_rows * 4, range.end * num_rows * 4});
  }
  std::copy(part.begin(), part.end(),
            parts_.begin() + columns[static_cast<size_t>(place_.tensor)].begin * num_rows);
  RETURN_IF_ERROR(tensor_->AllGather(std::as_writable_bytes(std::span(parts_)), bytes));
  for (const Group::Range& range : columns) {
    const int64_t size = range.end - range.begin;
    for (int64_t row = 0; row < num_rows; ++row) {
      std::copy_n(parts_.data() + range.begin * num_rows + row * size, size,
                  whole + row * width + range.begin);
    }
  }
  return OkStatus();
}

int RankGroups::RankOfStage(int stage) const {
  return RankOf(parallel_, {place_.tensor, place_.data, stage});
}

Status RankGroups::ReceiveFromStageBefore(std::span<std::byte> bytes) {
  const comm::Incoming message{RankOfStage(place_.pipeline - 1), bytes};
  return transport_->Exchange({}, {&message, 1});
}

Status RankGroups::SendToStageAfter(std::span<const std::byte> bytes) {
  const comm::Outgoing message{RankOfStage(place_.pipeline + 1), bytes};
  return transport_->Exchange({&message, 1}, {});
}

template Status RankGroups::GatherDataRanks(std::span<BFloat16>, int64_t, std::span<const int32_t>);
template Status RankGroups::GatherDataRanks(std::span<float>, int64_t, std::span<const int32_t>);
template Status RankGroups::GatherDataRanks(std::span<int32_t>, int64_t, std::span<const int32_t>);
template Status RankGroups::SumOverStage(std::span<BFloat16>, int64_t, std::span<const int32_t>);
template Status RankGroups::SumOverStage(std::span<float>, int64_t, std::span<const int32_t>);

}  // namespace fathom::model
