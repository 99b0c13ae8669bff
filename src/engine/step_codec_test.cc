#include "engine/step_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "engine/rank_runtime.h"
#include "engine/testing_steps.h"

namespace fathom::engine {
namespace {

using testing::HasSubstr;

void ExpectSame(const request::SamplingParams& a, const request::SamplingParams& b) {
  EXPECT_EQ(a.temperature, b.temperature);
  EXPECT_EQ(a.top_p, b.top_p);
  EXPECT_EQ(a.top_k, b.top_k);
  EXPECT_EQ(a.min_p, b.min_p);
  EXPECT_EQ(a.presence_penalty, b.presence_penalty);
  EXPECT_EQ(a.frequency_penalty, b.frequency_penalty);
  EXPECT_EQ(a.repetition_penalty, b.repetition_penalty);
  EXPECT_EQ(a.logit_bias, b.logit_bias);
  EXPECT_EQ(a.allowed_token_ids, b.allowed_token_ids);
  EXPECT_EQ(a.bad_words, b.bad_words);
  EXPECT_EQ(a.seed, b.seed);
  EXPECT_EQ(a.min_tokens, b.min_tokens);
  EXPECT_EQ(a.ignore_eos, b.ignore_eos);
  EXPECT_EQ(a.stop_token_ids, b.stop_token_ids);
  EXPECT_EQ(a.num_logprobs, b.num_logprobs);
  EXPECT_EQ(a.num_prompt_logprobs, b.num_prompt_logprobs);
}

std::vector<int32_t> Copy(std::span<const int32_t> ids) { return {ids.begin(), ids.end()}; }

void ExpectSame(const request::ScheduledSequence& a, TokenMask mask,
                const request::ScheduledSequence& b) {
  EXPECT_EQ(a.request_id, b.request_id);
  EXPECT_EQ(a.request->id, b.request->id);
  EXPECT_EQ(a.request->prompt_token_ids, b.request->prompt_token_ids);
  EXPECT_EQ(a.request->routed_experts_start, b.request->routed_experts_start);
  ExpectSame(a.request->sampling, b.request->sampling);
  EXPECT_EQ(Copy(a.token_ids), Copy(b.token_ids));
  EXPECT_EQ(Copy(a.all_token_ids), Copy(b.all_token_ids));
  EXPECT_EQ(a.num_computed_tokens, b.num_computed_tokens);
  EXPECT_EQ(a.sample, b.sample);
  EXPECT_EQ(a.block_table.blocks, b.block_table.blocks);
  EXPECT_EQ(a.block_table.window_pages, b.block_table.window_pages);
  EXPECT_EQ(a.block_table.first_window_page, b.block_table.first_window_page);
  EXPECT_EQ(a.block_table.state_slot, b.block_table.state_slot);
  ASSERT_EQ(b.request->constraint != nullptr, !mask.empty());
  if (mask.empty()) return;
  std::vector<uint32_t> words(3);
  EXPECT_TRUE(b.request->constraint->FillNextTokenMask(words));
  EXPECT_EQ(words, std::vector<uint32_t>(mask.begin(), mask.end()));
  EXPECT_EQ(static_cast<size_t>(b.request->constraint->num_accepted()),
            b.all_token_ids.size() - b.request->prompt_token_ids.size());
}

TEST(StepCodec, APlanArrivesAsItWasSent) {
  int num_known = 0;
  for (uint32_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    RandomSteps steps(seed);
    PlanEncoder encoder;
    PlanDecoder decoder(TestLimits());
    size_t most_bytes = 0;
    for (int i = 0; i < 60; ++i) {
      const RandomSteps::Step& step = steps.Next();
      const std::string bytes = encoder.Encode(step.batches, step.masks);
      const auto batches = decoder.Decode(bytes);
      ASSERT_TRUE(batches.ok()) << batches.status().message();
      ASSERT_EQ(batches->size(), 2u);
      for (size_t d = 0; d < 2; ++d) {
        const request::ScheduledBatch& batch = (*batches)[d];
        EXPECT_EQ(batch.step, step.batches[d].step);
        EXPECT_EQ(batch.transfers.copies, step.batches[d].transfers.copies);
        EXPECT_EQ(batch.data_rank_tokens, step.batches[d].data_rank_tokens);
        EXPECT_EQ(batch.data_ranks_decode, step.batches[d].data_ranks_decode);
        ASSERT_EQ(batch.sequences.size(), step.batches[d].sequences.size());
        for (size_t s = 0; s < batch.sequences.size(); ++s) {
          ExpectSame(step.batches[d].sequences[s], step.masks[d][s], batch.sequences[s]);
        }
      }
      most_bytes = std::max(most_bytes, bytes.size());
      num_known += bytes.size() < 700 ? 1 : 0;
    }
    EXPECT_GT(most_bytes, 1000u);
  }
  EXPECT_GT(num_known, 300) << "steps of known sequences are no longer small";
}

// Flips, cuts and inserts: an error, or a plan inside the limits.
TEST(StepCodec, NoBytesReachMoreThanTheLimitsAllow) {
  std::mt19937 random(7);
  int num_refused = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    RandomSteps steps(seed);
    PlanEncoder encoder;
    PlanDecoder decoder(TestLimits());
    for (int i = 0; i < 6; ++i) {
      const RandomSteps::Step& step = steps.Next();
      std::string bytes = encoder.Encode(step.batches, step.masks);
      if (i > 2) {
        const size_t at = random() % bytes.size();
        if (random() % 3 == 0) {
          bytes.resize(at);
        } else if (random() % 2 == 0) {
          bytes[at] = static_cast<char>(random());
        } else {
          bytes.insert(at, 1, static_cast<char>(random()));
        }
      }
      const auto batches = decoder.Decode(bytes);
      if (!batches.ok()) {
        EXPECT_EQ(batches.status().code(), StatusCode::kPeer);
        ++num_refused;
        break;
      }
      for (const request::ScheduledBatch& batch : *batches) {
        EXPECT_LE(batch.num_tokens(), TestLimits().max_num_batched_tokens);
        EXPECT_LE(batch.sequences.size(), 3u);
      }
    }
  }
  EXPECT_GT(num_refused, 200);
}

TEST(StepCodec, WhatIsWrongInAPlanIsSaid) {
  RandomSteps steps(3);
  const RandomSteps::Step* step = &steps.Next();
  while (step->batches[0].sequences.empty()) step = &steps.Next();
  PlanEncoder encoder;
  (void)encoder.Encode(step->batches, step->masks);
  const std::string bytes = encoder.Encode(step->batches, step->masks);
  const auto error_of = [&](const std::function<void(request::ScheduledBatch&)>& change) {
    std::vector<request::ScheduledBatch> batches = step->batches;
    change(batches[0]);
    std::vector<std::vector<TokenMask>> masks = step->masks;
    masks[0].resize(batches[0].sequences.size());
    const std::string wrong = PlanEncoder().Encode(batches, masks);
    return PlanDecoder(TestLimits()).Decode(wrong).status().message();
  };
  EXPECT_EQ(error_of([](auto&) {}), "");
  EXPECT_THAT(error_of([](auto& b) { b.sequences[0].block_table.window_pages.back() = -1; }),
              HasSubstr("lacks a window page"));
  EXPECT_THAT(error_of([](auto& b) { b.sequences[0].block_table.first_window_page += 1; }),
              HasSubstr("lacks a window page"));
  EXPECT_THAT(error_of([](auto& b) { b.sequences[0].block_table.blocks.pop_back(); }),
              HasSubstr("blocks end before its tokens"));
  EXPECT_THAT(error_of([](auto& b) { b.sequences[0].block_table.blocks[0] = 20; }),
              HasSubstr("a block is 20, not 0 to 19"));
  EXPECT_THAT(error_of([](auto& b) { b.sequences[0].block_table.state_slot = -1; }),
              HasSubstr("the state slot is -1"));
  EXPECT_THAT(error_of([](auto& b) { b.sequences[0].num_computed_tokens = 5000; }),
              HasSubstr("computed tokens is 5000"));
  EXPECT_THAT(error_of([](auto& b) { b.sequences.push_back(b.sequences[0]); }),
              HasSubstr("is twice"));
  EXPECT_THAT(error_of([](auto& b) {
                b.transfers.copies = {{.kind = request::KvCopy::Kind::kBlockToHost, .to = 8}};
              }),
              HasSubstr("destination is 8, not 0 to 7"));
  EXPECT_THAT(
      error_of([](auto& b) {
        b.transfers.copies = {{.kind = request::KvCopy::Kind::kLoadSnapshot, .position = 9}};
      }),
      HasSubstr("inside a block"));
  // A decoder that missed a step, and one with a smaller vocabulary.
  Status status = PlanDecoder(TestLimits()).Decode(bytes).status();
  EXPECT_THAT(status.message(), HasSubstr("was not in the step before"));
  StepLimits limits = TestLimits();
  limits.vocab_size = 2;
  status = PlanDecoder(limits).Decode(PlanEncoder().Encode(step->batches, step->masks)).status();
  EXPECT_THAT(status.message(), HasSubstr("not 0 to 1"));
}

// A plan that is refused ends the group, and with it everybody's requests.
TEST(StepCodec, WhateverTheApiLetsARequestAskForArrives) {
  RandomSteps steps(3);
  const RandomSteps::Step* step = &steps.Next();
  while (step->batches[0].sequences.empty()) step = &steps.Next();
  std::vector<request::ScheduledBatch> batches = step->batches;
  request::Request request = *batches[0].sequences[0].request;
  request.sampling.repetition_penalty = 0.001;
  request.sampling.top_k = std::numeric_limits<int32_t>::max();
  request.sampling.min_tokens = std::numeric_limits<int32_t>::max();
  request.sampling.num_logprobs = 1 << 24;  // as --max-logprobs may allow
  batches[0].sequences[0].request = &request;
  const auto plan = PlanDecoder(TestLimits()).Decode(PlanEncoder().Encode(batches, step->masks));
  EXPECT_TRUE(plan.ok()) << plan.status().message();
}

TEST(StepCodec, ResultsArriveAsTheyWereSentAndMustFitTheStep) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    RandomSteps steps(seed);
    for (int i = 0; i < 4; ++i) {
      const RandomSteps::Step& step = steps.Next();
      const auto sent = RandomResults(step.batches, seed);
      const std::vector<size_t> ranks =
          seed % 2 == 0 ? std::vector<size_t>{1} : std::vector<size_t>{0, 1};
      const std::string bytes = EncodeResults(ranks, sent);
      std::vector<request::StepResult> results(2);
      const Status status = DecodeResults(bytes, TestLimits(), ranks, step.batches, results);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(EncodeResults(ranks, results), bytes);
      for (const size_t d : ranks) {
        ASSERT_EQ(results[d].sequences.size(), sent[d].sequences.size());
        for (size_t s = 0; s < sent[d].sequences.size(); ++s) {
          EXPECT_EQ(results[d].sequences[s].sampled_token_ids,
                    sent[d].sequences[s].sampled_token_ids);
          EXPECT_EQ(results[d].sequences[s].status.message(),
                    sent[d].sequences[s].status.message());
        }
      }
      EXPECT_FALSE(DecodeResults(bytes + "x", TestLimits(), ranks, step.batches, results).ok());
      EXPECT_FALSE(DecodeResults(std::string_view(bytes).substr(1), TestLimits(), ranks,
                                 step.batches, results)
                       .ok());
    }
  }
}

TEST(SetupCodec, ThePlanOfTheKvCacheMustFitTheNodesOwnMemory) {
  kv_cache::KvLayout layout;
  layout.block_bytes = 100;
  layout.window_page_bytes = 10;
  layout.state.slot_bytes = 7;
  layout.snapshot.bytes = 3;
  const std::vector<RankMemory> own = {
      {.layout = layout, .budget_bytes = 5000, .host_bytes = 900, .origin = "a GPU"}};
  const auto memory = DecodeMemory(EncodeMemory(own), 1);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(memory->front().layout.block_bytes, 100);
  EXPECT_EQ(memory->front().layout.snapshot.bytes, 3);
  EXPECT_EQ(memory->front().budget_bytes, 5000);
  EXPECT_EQ(memory->front().origin, "a GPU");
  EXPECT_FALSE(DecodeMemory(EncodeMemory(own), 2).ok());
  EXPECT_FALSE(DecodeMemory("", 1).ok());

  EngineOptions options;
  options.limits.max_model_len = 4096;
  KvPlan plan{.max_model_len = 4096,
              .pools = {.num_blocks = 40, .num_window_pages = 90, .num_state_slots = 4},
              .host = {.num_blocks = 7, .num_snapshots = 3}};
  const auto decoded = DecodeKvPlan(EncodeKvPlan(plan), options, own);
  ASSERT_TRUE(decoded.ok()) << decoded.status().message();
  EXPECT_EQ(decoded->pools, plan.pools);
  EXPECT_EQ(decoded->host.num_snapshots, 3);
  plan.pools.num_blocks = 42;
  EXPECT_THAT(DecodeKvPlan(EncodeKvPlan(plan), options, own).status().message(),
              HasSubstr("start all nodes with the same flags"));
}

}  // namespace
}  // namespace fathom::engine
