#include "runtime/rank_disk.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace fathom::runtime {

namespace {

// New requests are seen after it.
constexpr auto kStoreWait = std::chrono::milliseconds(5);

}  // namespace

RankDisk::RankDisk(std::unique_ptr<kv_store::DiskStore> store, std::vector<Part> parts)
    : parts_(std::move(parts)), store_(std::move(store)) {}

void RankDisk::Submit(std::span<const request::ScheduledBatch> batches) {
  for (size_t part = 0; part < parts_.size(); ++part) {
    for (const request::KvStoreRequest& r : batches[parts_[part].data_rank].transfers.store) {
      Submit(part, r);
    }
  }
  const auto waits = [](const request::ScheduledBatch& batch) {
    return batch.transfers.wait_for_store;
  };
  const auto has_more = [&](const request::ScheduledBatch& batch) {
    return !batch.empty() && !waits(batch);
  };
  if (std::ranges::any_of(batches, waits) && std::ranges::none_of(batches, has_more)) {
    store_->WaitForEvent(kStoreWait);
  }
}

void RankDisk::Submit(size_t part, const request::KvStoreRequest& request) {
  std::vector<std::span<std::byte>> slots;
  for (const KvCache* rank : parts_[part].ranks) {
    if (request.host_slot < 0) break;
    slots.push_back(rank->host_slot(request.record.kind, request.host_slot));
  }
  store_->Submit(part, request, std::move(slots));
}

void RankDisk::TakeEvents(std::span<request::StepResult> results) {
  for (size_t part = 0; part < parts_.size(); ++part) {
    auto& events = results[parts_[part].data_rank].store_events;
    for (request::KvStoreEvent& event : store_->TakeEvents(part)) {
      event.num_ranks = static_cast<int32_t>(parts_[part].ranks.size());
      events.push_back(std::move(event));
    }
  }
}

}  // namespace fathom::runtime
