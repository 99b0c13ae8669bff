// The built-in model, and four layers as wide as Flash's, on GPUs that are data and tensor ranks
// and have some of the experts each, against the model on one GPU: the same bits for every prompt,
// whatever the other data ranks do, and for decodes, which are graphs; whatever carries what they
// exchange.
#include "comm/cuda_expert_ranks.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "comm/cuda_expert_kinds.h"
#include "comm/cuda_testing.h"
#include "model/cuda_testing.h"

namespace fathom::model {
namespace {

constexpr int kMaxSeqs = 8, kMaxLength = 700;

// A rank's part of a step: so many tokens of each of its first sequences.
using Chunk = std::vector<int>;

enum class Carrier { kPeers, kNccl, kHost };

struct Layout {
  const char* name;
  int tensor_ranks;
  int data_ranks;
  TestSource (*source)();
  Carrier carrier = Carrier::kPeers;
  config::ParallelConfig parallel() const {
    return {.tensor_parallel_size = tensor_ranks,
            .data_parallel_size = data_ranks,
            .enable_expert_parallel = true};
  }
};

Result<comm::CudaGroup> MakeGroup(std::span<const int> gpus, const comm::CudaGroupOptions& options,
                                  Carrier carrier) {
  if (carrier == Carrier::kPeers) return comm::MakePeerGroup(gpus, options);
  if (carrier == Carrier::kHost) return comm::MakeHostGroup(gpus, options);
  ASSIGN_OR_RETURN(const comm::NcclLibrary nccl, comm::LoadNccl());
  return comm::MakeNcclGroup(nccl, gpus, options);
}

Result<comm::CudaExpertGroup> MakeExpertRanks(std::span<const int> gpus,
                                              const comm::CudaExpertOptions& options,
                                              Carrier carrier) {
  if (carrier == Carrier::kPeers) return comm::MakePeerExpertRanks(gpus, options);
  const comm::CudaGroupOptions group = comm::ExpertGroupOptions(gpus.size(), options);
  ASSIGN_OR_RETURN(const comm::CudaGroup all, MakeGroup(gpus, group, carrier));
  return comm::MakeGatheredExpertRanks(all, gpus, options);
}

class CudaExpertRanksTest : public testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    const config::ParallelConfig parallel = GetParam().parallel();
    const int size = parallel.stage_size(), count = device::CountGpus();
    const int needed = GetParam().carrier == Carrier::kHost ? 1 : size;
    if (count < needed) GTEST_SKIP() << needed << " GPUs are needed, there are " << count;
    const std::vector<int> gpus = comm::GpusInTurn(size);
    const Status joined = Join(parallel, gpus);
    if (joined.code() == StatusCode::kNotFound) GTEST_SKIP() << joined.message();
    ASSERT_TRUE(joined.ok()) << joined.message();
    for (int r = 0; r < size; ++r) {
      const auto i = static_cast<size_t>(r);
      ranks_.push_back(
          source_.OnGpu(gpus[i], kMaxSeqs, kMaxLength,
                        {.collectives = tensor_ranks_[i], .expert_ranks = expert_ranks_[i]},
                        {parallel, PlaceOf(parallel, r), nullptr}));
    }
    for (int d = 0; d < parallel.data_parallel_size; ++d) {
      alone_.push_back(source_.OnGpu(gpus[static_cast<size_t>(d)], kMaxSeqs, kMaxLength));
    }
  }

  Status Join(const config::ParallelConfig& parallel, const std::vector<int>& gpus) {
    const ModelLimits limits = TestModel::Limits(kMaxSeqs, kMaxLength);
    const Carrier carrier = GetParam().carrier;
    ASSIGN_OR_RETURN(expert_ranks_,
                     MakeExpertRanks(gpus,
                                     {.hidden = source_.config.hidden_size,
                                      .num_experts = source_.config.num_experts,
                                      .num_chosen = source_.config.num_experts_per_token,
                                      .max_tokens = limits.max_batched_tokens,
                                      .num_tensor_ranks = parallel.tensor_parallel_size},
                                     carrier));
    tensor_ranks_.resize(gpus.size());
    const auto size = static_cast<size_t>(parallel.tensor_parallel_size);
    const comm::CudaGroupOptions options = GroupOptions(
        source_.config, limits, parallel.tensor_parallel_size, parallel.data_parallel_size);
    for (size_t first = 0; size > 1 && first < gpus.size(); first += size) {
      ASSIGN_OR_RETURN(const comm::CudaGroup group,
                       MakeGroup(std::span(gpus).subspan(first, size), options, carrier));
      std::copy(group.begin(), group.end(),
                tensor_ranks_.begin() + static_cast<std::ptrdiff_t>(first));
    }
    return OkStatus();
  }

  // Of a rank.
  size_t DataRank(size_t r) const { return r / static_cast<size_t>(GetParam().tensor_ranks); }

  std::vector<TestSequence> Sequences(TestModel& model, size_t data_rank) const {
    std::vector<TestSequence> sequences;
    for (int i = 0; i < kMaxSeqs; ++i) {
      sequences.push_back(model.Add(
          RandomTokens(source_.config, kMaxLength,
                       static_cast<uint32_t>(data_rank) * 100u + static_cast<uint32_t>(i))));
    }
    return sequences;
  }

  // steps[i][d]: what data rank d runs in step i. All logits of each rank, or of one GPU for each
  // data rank.
  std::vector<std::vector<TestSequence>> RunAll(const std::vector<std::vector<Chunk>>& steps,
                                                bool decode, bool alone) {
    auto& models = alone ? alone_ : ranks_;
    auto& sequences = alone ? of_alone_ : of_ranks_;
    if (sequences.empty()) {
      for (size_t r = 0; r < models.size(); ++r) {
        sequences.push_back(Sequences(*models[r], alone ? r : DataRank(r)));
      }
    }
    std::vector<std::thread> threads;
    for (size_t r = 0; r < models.size(); ++r) {
      threads.emplace_back([&, r] {
        const size_t d = alone ? r : DataRank(r);
        for (const std::vector<Chunk>& step : steps) {
          std::vector<int32_t> tokens;
          for (const Chunk& c : step) tokens.push_back(std::accumulate(c.begin(), c.end(), 0));
          if (step.size() == 1 && tokens[0] == 0) continue;
          if (alone && tokens[d] == 0) continue;
          std::vector<TestSequence*> own;
          for (size_t i = 0; i < step[d].size(); ++i) own.push_back(&sequences[r][i]);
          const bool several = !alone && step.size() > 1;
          models[r]->Step(own, step[d], nullptr,
                          several ? std::span<const int32_t>(tokens) : std::span<const int32_t>(),
                          several && decode);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return sequences;
  }

  void ExpectSame(const std::vector<std::vector<Chunk>>& steps, bool decode) {
    const auto expected = RunAll(steps, decode, true), actual = RunAll(steps, decode, false);
    for (size_t r = 0; r < actual.size(); ++r) {
      for (size_t i = 0; i < actual[r].size(); ++i) {
        EXPECT_EQ(actual[r][i].logits, expected[DataRank(r)][i].logits)
            << "rank " << r << ", sequence " << i;
      }
    }
  }

  // The same for data ranks beyond the second as for the first two in turn.
  std::vector<Chunk> Step(const Chunk& even, const Chunk& odd) const {
    std::vector<Chunk> step;
    for (int d = 0; d < GetParam().data_ranks; ++d) step.push_back(d % 2 == 0 ? even : odd);
    return step;
  }

  const TestSource source_ = GetParam().source();
  std::vector<std::shared_ptr<comm::CudaCollectives>> tensor_ranks_;
  comm::CudaExpertGroup expert_ranks_;
  std::vector<std::unique_ptr<TestModel>> alone_, ranks_;
  std::vector<std::vector<TestSequence>> of_alone_, of_ranks_;
};

TEST_P(CudaExpertRanksTest, GiveTheBitsOfOneGpu) {
  const Chunk none, all(kMaxSeqs, 9), one(1, 1), four(4, 1), eight(8, 1);
  ExpectSame({Step({300}, {17}), Step({100, 30}, none), Step(none, {2, 2, 2}), Step({3}, {600}),
              Step(all, all)},
             false);
  ExpectSame({Step(four, four), Step(eight, eight), Step(one, one), Step(four, none),
              Step(none, eight), Step(four, four), Step(eight, eight)},
             true);
}

TestSource Wide() { return WideModel(); }

INSTANTIATE_TEST_SUITE_P(
    Layouts, CudaExpertRanksTest,
    testing::Values(Layout{"BuiltInData2", 1, 2, OpenTinyModel},
                    Layout{"BuiltInTensor2", 2, 1, OpenTinyModel},
                    Layout{"BuiltInData4", 1, 4, OpenTinyModel},
                    Layout{"BuiltInTensor2Data2", 2, 2, OpenTinyModel},
                    Layout{"BuiltInTensor4", 4, 1, OpenTinyModel}, Layout{"WideData2", 1, 2, Wide},
                    Layout{"WideTensor2", 2, 1, Wide}, Layout{"WideData4", 1, 4, Wide},
                    Layout{"WideTensor2Data2", 2, 2, Wide}, Layout{"WideTensor4", 4, 1, Wide},
                    Layout{"BuiltInNcclData2", 1, 2, OpenTinyModel, Carrier::kNccl},
                    Layout{"WideNcclTensor2", 2, 1, Wide, Carrier::kNccl},
                    Layout{"WideNcclTensor2Data2", 2, 2, Wide, Carrier::kNccl},
                    Layout{"BuiltInHostData2", 1, 2, OpenTinyModel, Carrier::kHost},
                    Layout{"WideHostTensor2", 2, 1, Wide, Carrier::kHost},
                    Layout{"WideHostTensor2Data2", 2, 2, Wide, Carrier::kHost}),
    [](const auto& layout) { return layout.param.name; });

}  // namespace
}  // namespace fathom::model
