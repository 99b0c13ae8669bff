// The engine on a GPU with the built-in model: a request that is alone gets the same tokens whether
// a step is planned while the one before runs, and sampled tokens stay on the device, or not.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <regex>

#include "device/cuda/fault_keeper.h"
#include "engine/make_engine.h"
#include "engine/testing.h"
#include "model/cuda_testing.h"
#include "model/deepseek_v4_cuda.h"

namespace fathom::engine {
namespace {

// The model, until it is given blocks that do not exist.
class FaultyModel final : public model::DeepSeekV4 {
 public:
  FaultyModel(model::DeepSeekV4& model, int num_good_steps)
      : model_(model), num_good_steps_(num_good_steps) {}

  Status Forward(const model::ForwardBatch& batch, const model::KvCacheView& kv, float* logits,
                 device::Stream& stream, model::ChoiceRecorder* recorder) override {
    model::ForwardBatch given = batch;
    if (num_good_steps_-- <= 0) {
      blocks_.assign(batch.block_tables.size(), 1 << 24);
      given.block_tables = blocks_;
    }
    return model_.Forward(given, kv, logits, stream, recorder);
  }
  std::string LastBegun() const override { return model_.LastBegun(); }

 private:
  model::DeepSeekV4& model_;
  int num_good_steps_;
  std::vector<int32_t> blocks_;
};

class EngineCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    device::KeepFaultDumps();
    auto gpu = device::MakeCudaDevice(0);
    if (!gpu.ok()) GTEST_SKIP() << gpu.status().message();
    gpu_ = std::move(*gpu);
    const model::TestSource tiny = model::OpenTinyModel();
    config_ = tiny.config;
    auto model = model::MakeDeepSeekV4Cuda(config_, kv_cache::IndexKeyDType::kFp4, *tiny.weights,
                                           false, limits_, *gpu_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(*model);
  }

  void Start(bool async) { Start(async, *model_); }
  void Start(bool async, model::DeepSeekV4& served) {
    engine_.reset();
    metrics_ = std::make_unique<MetricsRegistry>();
    const auto layout =
        kv_cache::MakeKvLayout(config_, config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4);
    EngineOptions options = OptionsFor(config_, limits_);
    options.model_name = "tiny";
    options.kv_cache_bytes = int64_t{256} << 20;
    options.async_scheduling = async;
    auto engine = MakeEngine(options, {{.model = &served, .device = gpu_.get(), .layout = layout}},
                             *metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
  }

  std::shared_ptr<CollectingSink> Submit(int length, const request::SamplingParams& sampling,
                                         bool with_grammar = false) {
    request::Request request;
    request.id = engine_->NextRequestId();
    request.prompt_token_ids = model::RandomTokens(config_, length, static_cast<uint32_t>(length));
    request.sampling = sampling;
    if (with_grammar) request.constraint = std::make_shared<CountsModuloThree>();
    request.arrival = clock_.Now();
    auto sink = std::make_shared<CollectingSink>();
    EXPECT_TRUE(engine_->Submit(std::move(request), sink).ok());
    return sink;
  }

  // Ends the process: 0 when everything went as it must.
  void BreakTheGpu(bool async, int num_good_steps) {
    FaultyModel faulty(*model_, num_good_steps);
    Start(async, faulty);
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (const int length : {50, 300}) sinks.push_back(Submit(length, Params()[0]));
    for (const auto& sink : sinks) {
      const request::TokenEvent last = sink->Wait();
      if (last.finish_reason != request::FinishReason::kError) std::_Exit(1);
      if (last.error.code() != StatusCode::kDevice) std::_Exit(2);
      // The first layer that has blocks.
      static const std::regex kPlace(
          "failed in attention of layer 2, in [A-Z]\\w*Kernel.* of [1-9]\\d* blocks of [1-9]\\d* "
          "threads: ");
      if (!std::regex_search(last.error.message(), kPlace)) {
        std::fprintf(stderr, "%s\n", last.error.message().c_str());
        std::_Exit(3);
      }
    }
    if (engine_->Stats().healthy || engine_->Stats().error.ok()) std::_Exit(4);
    engine_.reset();
    model_.reset();
    gpu_.reset();
    std::_Exit(0);
  }

  static std::vector<request::SamplingParams> Params() {
    std::vector<request::SamplingParams> all(4);
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].seed = i;
      all[i].max_tokens = 90;
      all[i].ignore_eos = i != 3;
    }
    all[0].temperature = 0;
    all[0].num_logprobs = 5;
    all[1].top_p = 0.9;
    all[1].min_tokens = 40;
    all[2].repetition_penalty = 1.2;
    all[2].frequency_penalty = 0.5;
    all[3].num_logprobs = 30;  // more than the device reports
    return all;
  }

  const model::ModelLimits limits_{
      .max_batched_tokens = 512, .max_num_seqs = 12, .max_model_len = 1024};
  config::ModelConfig config_;
  SystemClock clock_;
  std::unique_ptr<MetricsRegistry> metrics_;
  std::unique_ptr<device::Device> gpu_;
  std::unique_ptr<model::DeepSeekV4> model_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineCudaTest, PlanningAheadChangesNoToken) {
  std::vector<std::vector<int32_t>> tokens[2];
  std::vector<std::vector<float>> logprobs[2];
  for (const bool async : {false, true}) {
    Start(async);
    for (const request::SamplingParams& params : Params()) {
      for (const int length : {1, 200, 257}) {
        const bool with_grammar = length == 200 && params.ignore_eos;
        const auto sink = Submit(length, params, with_grammar);
        EXPECT_EQ(sink->Wait().error.message(), "");
        tokens[async].push_back(sink->token_ids());
        auto& chosen = logprobs[async].emplace_back();
        for (size_t i = 0; with_grammar && i < sink->token_ids().size(); ++i) {
          EXPECT_EQ(sink->token_ids()[i] % 3, static_cast<int32_t>(i) % 3);
        }
        for (const auto& token : sink->logprobs()) chosen.push_back(token.chosen.logprob);
      }
    }
  }
  EXPECT_EQ(tokens[true], tokens[false]);
  EXPECT_EQ(logprobs[true], logprobs[false]);
}

TEST_F(EngineCudaTest, ManyRequestsComeAndGo) {
  Start(/*async=*/true);
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 60; ++i) {
    request::SamplingParams params = Params()[static_cast<size_t>(i) % 4];
    params.max_tokens = 1 + i * 2;
    params.ignore_eos = true;
    sinks.push_back(Submit(1 + i * 13 % 400, params, i % 5 == 0));
  }
  for (int i = 0; i < 60; ++i) {
    const auto last = sinks[static_cast<size_t>(i)]->Wait();
    EXPECT_EQ(last.finish_reason, request::FinishReason::kLength) << last.error.message();
    EXPECT_EQ(sinks[static_cast<size_t>(i)]->token_ids().size(), static_cast<size_t>(1 + i * 2));
  }
  engine_->Drain(std::chrono::seconds(5));
  EXPECT_EQ(engine_->Stats().kv_cache_usage, 0);
}

TEST_F(EngineCudaTest, AGpuThatBreaksEndsEveryRequestAndTheEngineSaysSo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const bool async : {false, true}) {
    for (const int num_good_steps : {0, 6}) {  // in a prompt's step, and in a graph of decodes
      EXPECT_EXIT(BreakTheGpu(async, num_good_steps), testing::ExitedWithCode(0),
                  "the engine stops: a step of ");
    }
  }
}

}  // namespace
}  // namespace fathom::engine
