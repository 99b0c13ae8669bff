#include "model/testing.h"

#include <algorithm>
#include <random>
#include <utility>

#include "base/check.h"
#include "checkpoint/shard.h"
#include "model/deepseek_v4_cuda.h"

namespace fathom::model {

config::ModelConfig SmallConfig() {
  config::ModelConfig c;
  c.vocab_size = 512;
  c.hidden_size = 256;
  c.num_layers = 5;
  c.max_position_embeddings = 4096;
  c.num_heads = 4;
  c.q_lora_rank = 128;
  c.o_lora_rank = 64;
  c.o_groups = 2;
  c.compress_ratios = {0, 4, 128, 4, 128};
  c.index_num_heads = 4;
  c.index_topk = 16;
  c.num_experts = 8;
  c.num_experts_per_token = 3;
  c.moe_intermediate_size = 128;
  c.num_hash_layers = 2;
  c.routed_scaling_factor = 1.5;
  c.swiglu_limit = 10;
  return c;
}

namespace {

// What no test's step has more of, so that long contexts fit.
constexpr int kMaxStepTokens = 8192;

Result<std::unique_ptr<DeepSeekV4>> MakeModel(const config::ModelConfig& config,
                                              config::Numerics numerics,
                                              kv_cache::IndexKeyDType index_dtype,
                                              const checkpoint::TensorSource& source,
                                              const ModelLimits& limits, device::Device& device,
                                              const CudaModelOptions& options,
                                              const ModelRank& rank) {
  if (device.kind() == device::DeviceKind::kCuda) {
    CudaModelOptions own = options;
    own.rank = rank;
    return MakeDeepSeekV4Cuda(config, index_dtype, source, false, limits, device, own);
  }
  ASSIGN_OR_RETURN(auto weights, LoadWeights(config, source, device));
  return MakeDeepSeekV4(config, numerics, index_dtype, std::move(weights), limits, device, rank);
}

}  // namespace

TestModel::TestModel(const config::ModelConfig& config, config::Numerics numerics, int num_threads,
                     int max_seqs, int max_len, kv_cache::IndexKeyDType index_dtype,
                     const checkpoint::TensorSource* weights_source,
                     std::unique_ptr<device::Device> gpu, const CudaModelOptions& options,
                     const ModelRank& rank)
    : config_(config),
      max_blocks_((max_len + kv_cache::kBlockTokens - 1) / kv_cache::kBlockTokens),
      max_pages_((max_len + kv_cache::kWindowPageTokens - 1) / kv_cache::kWindowPageTokens),
      device_(gpu != nullptr ? std::move(gpu) : device::MakeCpuDevice(num_threads)) {
  if (numerics == config::Numerics::kFp32) index_dtype = kv_cache::IndexKeyDType::kFp32;
  stream_ = std::move(device_->MakeStream().value());
  std::unique_ptr<checkpoint::TensorSource> synthetic;
  if (weights_source == nullptr) {
    synthetic = checkpoint::MakeSyntheticSource(config, 1);
    weights_source = synthetic.get();
  }
  std::unique_ptr<checkpoint::TensorSource> sharded;
  if (rank.parallel.world_size() > 1) {
    const bool on_gpu = device_->kind() == device::DeviceKind::kCuda;
    const auto shard = on_gpu ? checkpoint::MakeGpuShard(config, rank.parallel, rank.place).value()
                              : checkpoint::MakeShard(config, rank.parallel, rank.place).value();
    sharded = checkpoint::MakeShardedSource(*weights_source, config, shard);
    weights_source = sharded.get();
    config_ = shard.config;
  }
  layout_ = kv_cache::MakeKvLayout(config_, numerics, index_dtype);
  const ModelLimits limits = Limits(max_seqs, max_len);
  auto model =
      MakeModel(config_, numerics, index_dtype, *weights_source, limits, *device_, options, rank);
  CHECK(model.ok());
  model_ = std::move(*model);
  blocks_ = device_->Allocate(int64_t{max_seqs} * max_blocks_ * layout_.block_bytes).value();
  pages_ = device_->Allocate(int64_t{max_seqs} * max_pages_ * layout_.window_page_bytes).value();
  slots_ = device_->Allocate(max_seqs * layout_.state.slot_bytes).value();
  // What an earlier sequence left behind must not matter.
  for (const device::Buffer* buffer : {&blocks_, &pages_, &slots_}) {
    const std::vector<std::byte> garbage(static_cast<size_t>(buffer->bytes()), std::byte{0x5a});
    CHECK(stream_->Copy(buffer->data(), garbage.data(), buffer->bytes()).ok());
    CHECK(stream_->Synchronize().ok());
  }
  logits_ = std::move(
      device_->Allocate(int64_t{limits.max_batched_tokens} * config.vocab_size * 4).value());
}

ModelLimits TestModel::Limits(int max_seqs, int max_len) {
  return {.max_batched_tokens = std::min(max_seqs * max_len, kMaxStepTokens),
          .max_num_seqs = max_seqs,
          .max_model_len = max_len};
}

TestSequence TestModel::Add(std::vector<int32_t> token_ids) {
  return {.token_ids = std::move(token_ids), .index = next_index_++, .logits = {}};
}

void TestModel::Step(std::span<TestSequence* const> sequences, std::span<const int> counts,
                     ChoiceRecorder* recorder, std::span<const int32_t> data_rank_tokens,
                     bool data_ranks_decode) {
  std::vector<int32_t> ids, cu{0}, computed, blocks, pages, first_pages, slots, rows;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const TestSequence& sequence = *sequences[s];
    const auto begin = sequence.token_ids.begin() + sequence.num_computed;
    ids.insert(ids.end(), begin, begin + counts[s]);
    cu.push_back(static_cast<int32_t>(ids.size()));
    computed.push_back(sequence.num_computed);
    for (int i = 0; i < max_blocks_; ++i) blocks.push_back(sequence.index * max_blocks_ + i);
    const int32_t first = std::max(0, sequence.num_computed - (config_.sliding_window - 1)) /
                          kv_cache::kWindowPageTokens;
    for (int i = 0; i < max_pages_; ++i) {
      pages.push_back(first + i < max_pages_ ? sequence.index * max_pages_ + first + i : -1);
    }
    first_pages.push_back(first);
    slots.push_back(sequence.index);
  }
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int32_t i = last_logits_only_ ? cu[s + 1] - 1 : cu[s]; i < cu[s + 1]; ++i)
      rows.push_back(i);
  }
  const auto vocab = static_cast<size_t>(config_.vocab_size);
  std::vector<float> logits(rows.size() * vocab);
  expert_ids_.assign(ids.size() * static_cast<size_t>(config_.num_layers) *
                         static_cast<size_t>(config_.num_experts_per_token),
                     -1);
  const ForwardBatch batch{.token_ids = ids,
                           .cu_seqlens_q = cu,
                           .num_computed = computed,
                           .block_tables = blocks,
                           .max_blocks = max_blocks_,
                           .window_tables = pages,
                           .max_window_pages = max_pages_,
                           .first_window_page = first_pages,
                           .state_slots = slots,
                           .logits_rows = rows,
                           .data_rank_tokens = data_rank_tokens,
                           .data_ranks_decode = data_ranks_decode,
                           .expert_ids = expert_ids_};
  CHECK(model_
            ->Forward(batch, {blocks_.data(), pages_.data(), slots_.data()},
                      reinterpret_cast<float*>(logits_.data()), *stream_, recorder)
            .ok());
  CHECK(stream_->Copy(logits.data(), logits_.data(), static_cast<int64_t>(logits.size() * 4)).ok());
  CHECK(stream_->Synchronize().ok());
  size_t row = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int i = last_logits_only_ ? counts[s] - 1 : 0; i < counts[s]; ++i, ++row) {
      const auto begin = logits.begin() + static_cast<int64_t>(row * vocab);
      sequences[s]->logits.emplace_back(begin, begin + static_cast<int64_t>(vocab));
    }
    sequences[s]->num_computed += counts[s];
  }
}

void TestModel::RunInChunks(TestSequence& sequence, int chunk) {
  const auto size = static_cast<int>(sequence.token_ids.size());
  while (sequence.num_computed < size) {
    TestSequence* const sequences[] = {&sequence};
    const int counts[] = {std::min(chunk, size - sequence.num_computed)};
    Step(sequences, counts);
  }
}

void TestModel::CopyCache(const TestModel& source, const TestSequence& from, TestSequence& to) {
  const auto copy = [&](device::Buffer& own, const device::Buffer& others, int64_t bytes) {
    CHECK(source.stream_
              ->Copy(own.data() + to.index * bytes, others.data() + from.index * bytes, bytes)
              .ok());
  };
  copy(blocks_, source.blocks_, max_blocks_ * layout_.block_bytes);
  copy(pages_, source.pages_, max_pages_ * layout_.window_page_bytes);
  copy(slots_, source.slots_, layout_.state.slot_bytes);
  CHECK(source.stream_->Synchronize().ok());
  to.num_computed = from.num_computed;
}

void TestModel::Rollback(TestSequence& sequence, int32_t num_tokens) {
  sequence.num_computed -= num_tokens;
  sequence.logits.resize(static_cast<size_t>(sequence.num_computed));
}

std::vector<int32_t> RandomTokens(const config::ModelConfig& config, int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size)));
  }
  return ids;
}

}  // namespace fathom::model
