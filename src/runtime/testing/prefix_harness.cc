#include "runtime/testing/prefix_harness.h"

#include <unistd.h>

#include <algorithm>

#include "model/deepseek_v4_cuda.h"
#include "model/weights.h"

namespace fathom::runtime {

using config::Numerics;
using kv_cache::Admission;
using kv_cache::IndexKeyDType;
using kv_cache::PrefixCacheOptions;

Result<std::unique_ptr<HarnessModel>> LoadHarnessModel(const config::ModelConfig& config,
                                                       Numerics numerics,
                                                       const checkpoint::TensorSource* source,
                                                       std::unique_ptr<device::Device> device,
                                                       int max_chunk, int64_t max_model_len) {
  const IndexKeyDType index_dtype =
      numerics == Numerics::kFp32 ? IndexKeyDType::kFp32 : IndexKeyDType::kFp4;
  auto m = std::make_unique<HarnessModel>();
  m->config = config;
  m->layout = kv_cache::MakeKvLayout(config, numerics, index_dtype);
  m->device = std::move(device);
  m->max_chunk = max_chunk;
  const model::ModelLimits limits{
      .max_batched_tokens = max_chunk, .max_num_seqs = 1, .max_model_len = max_model_len};
  ASSIGN_OR_RETURN(m->stream, m->device->MakeStream());
  if (m->device->kind() == device::DeviceKind::kCpu) {
    ASSIGN_OR_RETURN(auto weights, model::LoadWeights(config, *source, *m->device));
    ASSIGN_OR_RETURN(m->model, model::MakeDeepSeekV4(config, numerics, index_dtype,
                                                     std::move(weights), limits, *m->device));
  } else {
    const bool dummy = source == nullptr;
    const auto synthetic = checkpoint::MakeSyntheticSource(config, 1);
    ASSIGN_OR_RETURN(m->model,
                     model::MakeDeepSeekV4Cuda(config, index_dtype, dummy ? *synthetic : *source,
                                               dummy, limits, *m->device));
  }
  ASSIGN_OR_RETURN(m->logits, m->device->Allocate(int64_t{max_chunk} * config.vocab_size * 4));
  return m;
}

PrefixHarness::~PrefixHarness() {
  disk_.reset();
  if (!directory_.empty()) std::filesystem::remove_all(directory_);
}

int64_t PrefixHarness::SnapshotBytes() const {
  return kv_cache::SnapshotBytesWithPages(model_.layout, model_.config.sliding_window);
}

PrefixCacheOptions PrefixHarness::Options() const {
  return {.pools = {.num_blocks = 24,
                    .num_window_pages = 48,
                    .num_state_slots = 4,
                    .num_snapshots = 24},
          .retention_interval = 256,
          .block_bytes = model_.layout.block_bytes,
          .snapshot_bytes = SnapshotBytes()};
}

void PrefixHarness::Restart(PrefixCacheOptions options) {
  disk_.reset();
  if (options.disk_bytes > 0) {
    if (directory_.empty()) {
      std::string name = std::filesystem::temp_directory_path() / "fathom-exact-XXXXXX";
      ASSERT_NE(mkdtemp(name.data()), nullptr);
      directory_ = name;
    }
    auto disk = kv_store::DiskStore::Open(
        {.directory = directory_,
         .parts = {
             {.name = "tiny", .payload_bytes = {model_.layout.block_bytes, SnapshotBytes()}}}});
    ASSERT_TRUE(disk.ok()) << disk.status().message();
    disk_ = *std::move(disk);
    options.hash_key = disk_->key();
  }
  options_ = options;
  auto memory = KvCache::Make(model_.layout, options.pools, *model_.device,
                              {.num_blocks = options.num_host_blocks,
                               .num_snapshots = options.num_host_snapshots,
                               .snapshot_bytes = SnapshotBytes()});
  ASSERT_TRUE(memory.ok()) << memory.status().message();
  memory_ = *std::move(memory);
  const model::KvCacheView view = memory_.view();
  FillWithGarbage(view.blocks, options.pools.num_blocks * model_.layout.block_bytes);
  FillWithGarbage(view.window_pages,
                  options.pools.num_window_pages * model_.layout.window_page_bytes);
  FillWithGarbage(view.state_slots, options.pools.num_state_slots * model_.layout.state.slot_bytes);
  cache_ = std::make_unique<kv_cache::PrefixCache>(options);
}

void PrefixHarness::FillWithGarbage(std::byte* data, int64_t bytes) {
  const std::vector<std::byte> garbage(static_cast<size_t>(bytes), std::byte{0x5a});
  ASSERT_TRUE(model_.stream->Copy(data, garbage.data(), bytes).ok());
  ASSERT_TRUE(model_.stream->Synchronize().ok());
}

void PrefixHarness::RunTransfers() {
  const request::KvTransfers transfers = cache_->TakeTransfers(true);
  ASSERT_TRUE(memory_.Run(transfers.copies, *model_.stream).ok());
  if (disk_ == nullptr) return;
  ASSERT_TRUE(model_.stream->Synchronize().ok());
  for (const request::KvStoreRequest& r : transfers.store) {
    std::vector<std::span<std::byte>> slots;
    if (r.host_slot >= 0) slots.push_back(memory_.host_slot(r.record.kind, r.host_slot));
    disk_->Submit(0, r, std::move(slots));
  }
  if (transfers.wait_for_store) disk_->WaitForEvent(std::chrono::milliseconds(20));
  cache_->OnStoreEvents(disk_->TakeEvents(0));
}

void PrefixHarness::Admit(Sequence& s) {
  for (int i = 0; i < 1000; ++i) {
    const auto length = static_cast<int64_t>(s.token_ids.size());
    const Admission admission = cache_->Admit(
        {.token_ids = s.token_ids, .num_prompt_tokens = length, .num_tokens = length + 1}, s.kv);
    s.num_computed = s.num_cached = admission.num_cached_tokens;
    if (admission.outcome == Admission::Outcome::kAdmitted) return;
    ASSERT_EQ(admission.outcome, Admission::Outcome::kWait);
    RunTransfers();
  }
  FAIL() << "waits forever";
}

void PrefixHarness::Forward(Sequence& s, std::span<const int32_t> token_ids, LogitsRows* rows,
                            model::ChoiceRecorder* recorder) {
  ASSERT_LE(token_ids.size(), static_cast<size_t>(model_.max_chunk));
  s.calls.push_back({s.num_computed, {token_ids.begin(), token_ids.end()}});
  cache_->Extend(s.kv, s.num_computed, static_cast<int64_t>(token_ids.size()));
  RunTransfers();
  batch_.Clear();
  batch_.AddSequence(token_ids, static_cast<int32_t>(s.num_computed), s.kv.table);
  if (prompt_steps_) batch_.MarkPrompt();
  for (size_t i = 0; i < token_ids.size(); ++i) batch_.AddLogitsRow(i);
  ASSERT_TRUE(model_.model
                  ->Forward(batch_.View(), memory_.view(),
                            reinterpret_cast<float*>(model_.logits.data()), *model_.stream,
                            recorder)
                  .ok());
  const auto vocab = static_cast<size_t>(model_.config.vocab_size);
  std::vector<float> logits(rows == nullptr ? 0 : token_ids.size() * vocab);
  if (rows != nullptr) {
    ASSERT_TRUE(model_.stream
                    ->Copy(logits.data(), model_.logits.data(),
                           static_cast<int64_t>(logits.size() * sizeof(float)))
                    .ok());
  }
  ASSERT_TRUE(model_.stream->Synchronize().ok());
  for (auto row = logits.begin(); row != logits.end(); row += static_cast<std::ptrdiff_t>(vocab)) {
    rows->emplace_back(row, row + static_cast<std::ptrdiff_t>(vocab));
  }
}

void PrefixHarness::RunChunk(Sequence& s, int64_t most, LogitsRows* rows,
                             model::ChoiceRecorder* recorder) {
  const auto left = static_cast<int64_t>(s.token_ids.size()) - s.num_computed;
  const int64_t n = cache_->ClipChunk(s.kv, s.num_computed, std::min(most, left));
  Forward(
      s,
      std::span(s.token_ids).subspan(static_cast<size_t>(s.num_computed), static_cast<size_t>(n)),
      rows, recorder);
  s.num_computed += n;
  cache_->OnComputed(s.kv, s.token_ids, s.num_computed);
}

void PrefixHarness::RunToEnd(Sequence& s, int64_t chunk, LogitsRows* rows) {
  while (s.num_computed < static_cast<int64_t>(s.token_ids.size()) &&
         !testing::Test::HasFatalFailure()) {
    RunChunk(s, chunk, rows);
  }
}

void PrefixHarness::Settle() {
  while (cache_->HasWork()) RunTransfers();
}

void PrefixHarness::FillDevice() {
  std::vector<int32_t> other(static_cast<size_t>(options_.pools.num_blocks) * 256 - 1);
  for (int32_t& t : other) {
    t = static_cast<int32_t>(random_() % static_cast<uint32_t>(model_.config.vocab_size));
  }
  Sequence s{.token_ids = std::move(other)};
  Admit(s);
  Release(s);
}

}  // namespace fathom::runtime
