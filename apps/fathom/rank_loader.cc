#include "apps/fathom/rank_loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "apps/fathom/progress.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "checkpoint/shard.h"
#include "comm/cuda_group.h"
#include "device/cuda/fault_keeper.h"
#include "device/cuda/multi_gpu.h"
#include "kernels/collective/peer_view.h"
#include "model/deepseek_v4_cuda.h"
#include "model/weights.h"

namespace fathom::app {
namespace {

// What all ranks have read, on one line. Any thread; many tell of reads at the same time, so that
// none waits for another.
class LoadProgress {
 public:
  explicit LoadProgress(const std::string& what) : line_(what) {}

  void Expect(int64_t bytes) { total_bytes_ += bytes; }  // before any read
  void Begin() {
    std::call_once(has_begun_, [this] { begin_ = clock_.Now(); });
  }
  void Add(int64_t bytes) {
    const int64_t done = done_bytes_ += bytes;
    const std::unique_lock lock(line_mutex_, std::try_to_lock);
    if (lock) line_.Update(done, total_bytes_);
  }
  // When no thread reads any more.
  int64_t done_bytes() const { return done_bytes_; }
  double SecondsSinceFirstRead() const {
    return begin_ == TimePoint{} ? 0 : Seconds(clock_.Now() - begin_);
  }

 private:
  const SystemClock clock_;
  int64_t total_bytes_ = 0;
  std::once_flag has_begun_;
  TimePoint begin_{};
  std::atomic<int64_t> done_bytes_{0};
  std::mutex line_mutex_;
  ProgressLine line_;  // guarded
};

// Reads pass through and are told.
class ReportingSource final : public checkpoint::TensorSource {
 public:
  ReportingSource(std::unique_ptr<checkpoint::TensorSource> source, LoadProgress& progress)
      : source_(std::move(source)), progress_(progress) {
    for (const checkpoint::TensorInfo& tensor : tensors()) progress.Expect(tensor.bytes);
  }
  const std::vector<checkpoint::TensorInfo>& tensors() const override { return source_->tensors(); }
  const checkpoint::TensorInfo* Find(std::string_view name) const override {
    return source_->Find(name);
  }
  Status Read(const checkpoint::TensorInfo& tensor, int64_t offset,
              std::span<std::byte> out) const override {
    progress_.Begin();
    RETURN_IF_ERROR(source_->Read(tensor, offset, out));
    progress_.Add(static_cast<int64_t>(out.size()));
    return OkStatus();
  }

 private:
  const std::unique_ptr<checkpoint::TensorSource> source_;
  LoadProgress& progress_;
};

// What a rank does together with others on GPUs; null: nothing.
struct Partners {
  std::shared_ptr<comm::CudaCollectives> collectives;   // tensor ranks of its data rank
  std::shared_ptr<comm::CudaExpertRanks> expert_ranks;  // ranks of its stage, with whole experts
};

Result<std::unique_ptr<model::DeepSeekV4>> LoadModel(const ModelOptions& options,
                                                     const RankModelOptions& model_options,
                                                     const checkpoint::TensorSource& source,
                                                     const SessionRank& rank,
                                                     const Partners& partners) {
  if (rank.gpu >= 0) {
    return model::MakeDeepSeekV4Cuda(rank.config, model_options.index_dtype, source,
                                     options.load_format == LoadFormat::kDummy,
                                     model_options.limits, *rank.device,
                                     {.enforce_eager = options.enforce_eager,
                                      .collectives = partners.collectives,
                                      .expert_ranks = partners.expert_ranks,
                                      .rank = {options.parallel, rank.place, rank.transport}});
  }
  ASSIGN_OR_RETURN(auto weights, model::LoadWeights(rank.config, source, *rank.device));
  return model::MakeDeepSeekV4(rank.config, model_options.numerics, model_options.index_dtype,
                               std::move(weights), model_options.limits, *rank.device,
                               {options.parallel, rank.place, rank.transport});
}

comm::CudaExpertOptions ExpertOptions(const ModelOptions& options,
                                      const RankModelOptions& model_options) {
  return {.hidden = model_options.config.hidden_size,
          .num_experts = model_options.config.num_experts,
          .num_chosen = model_options.config.num_experts_per_token,
          .max_tokens = model_options.limits.max_batched_tokens,
          .num_tensor_ranks = options.parallel.tensor_parallel_size,
          .custom_all_reduce = !options.disable_custom_all_reduce};
}

comm::CudaGroupOptions GroupOptions(const ModelOptions& options,
                                    const RankModelOptions& model_options) {
  comm::CudaGroupOptions group = model::GroupOptions(model_options.config, model_options.limits,
                                                     options.parallel.tensor_parallel_size,
                                                     options.parallel.data_parallel_size);
  group.custom_all_reduce = !options.disable_custom_all_reduce;
  return group;
}

// The rank is the only one of its process. All ranks of a stage join one group after the other in
// this order.
Result<Partners> JoinProcesses(const ModelOptions& options, const RankModelOptions& model_options,
                               const SessionRank& rank) {
  const config::ParallelConfig& parallel = options.parallel;
  std::vector<int> of_data_rank, of_stage;
  for (int data = 0; data < parallel.data_parallel_size; ++data) {
    for (int tensor = 0; tensor < parallel.tensor_parallel_size; ++tensor) {
      of_stage.push_back(RankOf(parallel, {tensor, data, rank.place.pipeline}));
      if (data == rank.place.data) of_data_rank.push_back(of_stage.back());
    }
  }
  Partners partners;
  if (of_data_rank.size() > 1) {
    ASSIGN_OR_RETURN(partners.collectives,
                     comm::JoinCudaGroup(*rank.transport, of_data_rank, rank.gpu,
                                         GroupOptions(options, model_options)));
  }
  if (parallel.gpus_have_whole_experts()) {
    ASSIGN_OR_RETURN(partners.expert_ranks,
                     comm::JoinCudaExpertRanks(*rank.transport, of_stage, rank.gpu,
                                               ExpertOptions(options, model_options)));
  }
  return partners;
}

// The ranks of one stage, all of this process.
Status JoinStage(const ModelOptions& options, const RankModelOptions& model_options,
                 std::span<const int> gpus, std::span<Partners> partners) {
  const auto size = static_cast<size_t>(options.parallel.tensor_parallel_size);
  for (size_t first = 0; size > 1 && first < gpus.size(); first += size) {
    ASSIGN_OR_RETURN(const auto group, comm::MakeCudaGroup(gpus.subspan(first, size),
                                                           GroupOptions(options, model_options)));
    for (size_t i = 0; i < size; ++i) partners[first + i].collectives = group[i];
  }
  if (!options.parallel.gpus_have_whole_experts()) return OkStatus();
  ASSIGN_OR_RETURN(const auto all,
                   comm::MakeCudaExpertRanks(gpus, ExpertOptions(options, model_options)));
  for (size_t i = 0; i < gpus.size(); ++i) partners[i].expert_ranks = all[i];
  return OkStatus();
}

// The ranks of this process are whole stages, or one rank.
Result<std::vector<Partners>> JoinGpus(const ModelOptions& options,
                                       const RankModelOptions& model_options,
                                       const std::vector<SessionRank>& ranks) {
  const config::ParallelConfig& parallel = options.parallel;
  std::vector<Partners> partners(ranks.size());
  if (parallel.world_size() == 1 || ranks.front().gpu < 0) return partners;
  if (options.only_rank) {
    ASSIGN_OR_RETURN(partners[0].collectives,
                     comm::MakeLoneRank(*options.only_rank, parallel.tensor_parallel_size,
                                        ranks.front().gpu, GroupOptions(options, model_options)));
    return partners;
  }
  std::vector<int> gpus;
  for (const SessionRank& rank : ranks) gpus.push_back(rank.gpu);
  device::ReachEachOther(gpus);
  if (parallel.gpus_have_whole_experts() && !parallel.enable_expert_parallel) {
    LogInfo("data ranks on GPUs hold whole experts each, as with --enable-expert-parallel");
  }
  const auto size = static_cast<size_t>(parallel.stage_size());
  if (size == 1) return partners;
  if (ranks.size() < size) {
    ASSIGN_OR_RETURN(partners[0], JoinProcesses(options, model_options, ranks[0]));
    return partners;
  }
  for (size_t first = 0; first < gpus.size(); first += size) {
    RETURN_IF_ERROR(JoinStage(options, model_options, std::span(gpus).subspan(first, size),
                              std::span(partners).subspan(first, size)));
  }
  return partners;
}

Status CheckLayout(const config::ParallelConfig& parallel, int num_ranks) {
  RETURN_IF_ERROR(CheckGpuLayout(parallel));
  if (num_ranks != 1 && num_ranks % parallel.stage_size() != 0) {
    return InvalidArgument(
        fmt::format("GPUs run whole pipeline stages in a process, or one rank: {} ranks are "
                    "neither; change --nnodes, or add --device cpu",
                    num_ranks));
  }
  return OkStatus();
}

// Where there is no GPU at all, opening the first says why.
Status CheckGpus(int num_ranks, int first_gpu) {
  const int num_gpus = device::CountGpus();
  if (num_gpus == 0 || first_gpu + num_ranks <= num_gpus) return OkStatus();
  if (first_gpu > 0) {
    return DeviceError(
        fmt::format("this process is to run on GPU {} of its host, counted from 0, and sees {}: "
                    "show it that one alone, or all (CUDA_VISIBLE_DEVICES)",
                    first_gpu, num_gpus));
  }
  return DeviceError(
      fmt::format("{} GPUs are needed, one for each rank of this host, and {} are there "
                  "(nvidia-smi, CUDA_VISIBLE_DEVICES): lower a --...-parallel-size, or add hosts "
                  "with --nnodes",
                  num_ranks, num_gpus));
}

// CUDA's own: whether it makes dumps of a GPU that broke, where its other variables say.
constexpr const char* kDumpsVariable = "CUDA_ENABLE_COREDUMP_ON_EXCEPTION";

Result<std::vector<SessionRank>> OpenGpus(const ModelOptions& options, int num_ranks,
                                          int first_gpu) {
  if (options.numerics == config::Numerics::kFp32) {
    return InvalidArgument("--numerics fp32 runs on the CPU only: add --device cpu");
  }
  RETURN_IF_ERROR(CheckLayout(options.parallel, num_ranks));
  if (options.parallel.world_size() > 1) device::LoadKernelsEagerly();
  if (std::getenv(kDumpsVariable) == nullptr) device::KeepFaultDumps();
  // Some launchers show each process its own GPU only.
  if (num_ranks == 1 && device::CountGpus() == 1) first_gpu = 0;
  RETURN_IF_ERROR(CheckGpus(num_ranks, first_gpu));
  std::vector<SessionRank> ranks(static_cast<size_t>(num_ranks));
  for (int i = 0; i < num_ranks; ++i) {
    SessionRank& rank = ranks[static_cast<size_t>(i)];
    rank.gpu = first_gpu + i;
    ASSIGN_OR_RETURN(rank.device, device::MakeCudaDevice(rank.gpu));
  }
  return ranks;
}

}  // namespace

Status CheckGpuLayout(const config::ParallelConfig& parallel) {
  if (parallel.stage_size() <= kernels::kMaxPeers) return OkStatus();
  return InvalidArgument(
      fmt::format("GPUs run at most {} ranks in a stage, --tensor-parallel-size times "
                  "--data-parallel-size, and {} are asked for: add --pipeline-parallel-size, or "
                  "--device cpu",
                  kernels::kMaxPeers, parallel.stage_size()));
}

Result<std::vector<SessionRank>> OpenDevices(const ModelOptions& options, int num_ranks,
                                             int first_gpu) {
  if (options.device == DeviceChoice::kCuda || options.only_rank) {
    return OpenGpus(options, num_ranks, first_gpu);
  }
  if (options.device == DeviceChoice::kAuto && options.numerics != config::Numerics::kFp32) {
    auto gpus = OpenGpus(options, num_ranks, first_gpu);
    const bool is_meant = options.parallel.world_size() > 1 && device::CountGpus() > 0;
    if (gpus.ok() || is_meant) return gpus;
    if (device::MayHaveGpus()) LogWarning("the CPU is used: {}", gpus.status().message());
  }
  const int threads = options.num_threads > 0 ? options.num_threads : NumUsableCores();
  std::vector<SessionRank> ranks(static_cast<size_t>(num_ranks));
  for (SessionRank& rank : ranks) {
    rank.device = device::MakeCpuDevice(std::max(1, threads / num_ranks));
  }
  return ranks;
}

Status LoadRanks(const ModelOptions& options, const RankModelOptions& model_options,
                 const checkpoint::TensorSource& source, std::vector<SessionRank>& ranks,
                 LoadTimes& times) {
  LoadProgress progress("loading " + options.model);
  std::vector<std::unique_ptr<checkpoint::TensorSource>> sources;
  ASSIGN_OR_RETURN(const std::vector<Partners> partners, JoinGpus(options, model_options, ranks));
  for (SessionRank& rank : ranks) {
    const bool on_gpu = rank.device->kind() == device::DeviceKind::kCuda;
    ASSIGN_OR_RETURN(const checkpoint::Shard shard,
                     (on_gpu ? checkpoint::MakeGpuShard : checkpoint::MakeShard)(
                         model_options.config, options.parallel, rank.place));
    rank.config = shard.config;
    sources.push_back(std::make_unique<ReportingSource>(
        checkpoint::MakeShardedSource(source, model_options.config, shard), progress));
  }
  std::vector<Status> statuses(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      auto model = LoadModel(options, model_options, *sources[i], ranks[i], partners[i]);
      statuses[i] = model.status();
      if (model.ok()) ranks[i].model = std::move(*model);
    });
  }
  for (std::thread& thread : threads) thread.join();
  times.bytes = progress.done_bytes();
  times.transfer_seconds = progress.SecondsSinceFirstRead();
  const auto failed =
      std::find_if(statuses.begin(), statuses.end(), [](const Status& s) { return !s.ok(); });
  return failed == statuses.end() ? OkStatus() : *failed;
}

}  // namespace fathom::app
