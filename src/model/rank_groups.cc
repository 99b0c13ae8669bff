#include "model/rank_groups.h"

#include <cstring>

#include "base/check.h"
#include "base/float_types.h"

namespace fathom::model {

using comm::Group;

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

int RankGroups::size(Who who) const {
  const int tensor = parallel_.tensor_parallel_size, data = parallel_.data_parallel_size;
  return who == Who::kTensor ? tensor : who == Who::kData ? data : tensor * data;
}

int RankGroups::rank(Who who) const {
  if (who == Who::kTensor) return place_.tensor;
  if (who == Who::kData) return place_.data;
  return place_.data * parallel_.tensor_parallel_size + place_.tensor;
}

std::vector<Group::Range> RankGroups::PartsOf(Who who, int64_t total, int64_t unit) const {
  std::vector<Group::Range> parts;
  for (int i = 0; i < size(who); ++i) {
    const checkpoint::Range part = checkpoint::Part(total, unit, i, size(who));
    parts.push_back({part.begin, part.end});
  }
  return parts;
}

Group* RankGroups::Find(Who who) {
  std::optional<Group>& group = who == Who::kTensor ? tensor_ : who == Who::kData ? data_ : stage_;
  return group ? &*group : nullptr;
}

template <typename T>
Status RankGroups::GatherColumns(Who who, T* matrix, int64_t num_rows,
                                 std::span<const Group::Range> columns) {
  Group* const group = Find(who);
  if (group == nullptr || num_rows == 0) return OkStatus();
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  const int64_t width = columns.back().end;
  parts_.resize(static_cast<size_t>(num_rows * width * kSize));
  T* const parts = reinterpret_cast<T*>(parts_.data());
  // Everyone's columns lie together, one after another.
  std::vector<Group::Range> bytes;
  for (const Group::Range& range : columns) {
    bytes.push_back({range.begin * num_rows * kSize, range.end * num_rows * kSize});
  }
  const auto copy = [&](const Group::Range& range, bool out) {
    const int64_t size = range.end - range.begin;
    if (size == 0) return;
    for (int64_t row = 0; row < num_rows; ++row) {
      T* const part = parts + range.begin * num_rows + row * size;
      T* const place = matrix + row * width + range.begin;
      std::memcpy(out ? part : place, out ? place : part, static_cast<size_t>(size * kSize));
    }
  };
  const auto own = static_cast<size_t>(rank(who));
  copy(columns[own], true);
  RETURN_IF_ERROR(group->AllGather(parts_, bytes));
  for (size_t i = 0; i < columns.size(); ++i) {
    if (i != own) copy(columns[i], false);
  }
  return OkStatus();
}

template <typename T>
Status RankGroups::GatherRows(Who who, T* matrix, int64_t row_size,
                              std::span<const Group::Range> rows) {
  Group* const group = Find(who);
  if (group == nullptr) return OkStatus();
  const int64_t row_bytes = row_size * static_cast<int64_t>(sizeof(T));
  std::vector<Group::Range> bytes;
  for (const Group::Range& range : rows) {
    bytes.push_back({range.begin * row_bytes, range.end * row_bytes});
  }
  const auto end = static_cast<size_t>(rows.back().end * row_size);
  return group->AllGather(std::as_writable_bytes(std::span(matrix, end)), bytes);
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

template Status RankGroups::GatherColumns(Who, BFloat16*, int64_t, std::span<const Group::Range>);
template Status RankGroups::GatherColumns(Who, float*, int64_t, std::span<const Group::Range>);
template Status RankGroups::GatherRows(Who, BFloat16*, int64_t, std::span<const Group::Range>);
template Status RankGroups::GatherRows(Who, float*, int64_t, std::span<const Group::Range>);
template Status RankGroups::GatherRows(Who, int32_t*, int64_t, std::span<const Group::Range>);

}  // namespace fathom::model
