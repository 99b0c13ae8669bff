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
        EXPECT_EQ(batch.transfers.store, step.batches[d].transfers.store);
        EXPECT_EQ(batch.transfers.wait_for_store, step.batches[d].transfers.wait_for_store);
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
  request::KvStoreRequest read{.kind = request::KvStoreRequest::Kind::kRead,
                               .record = {.hash = {1, 2}, .num_tokens = 256},
                               .host_slot = 7};
  read.record.token_ids.assign(256, 1);
  const auto error_of_read = [&](const std::function<void(request::KvStoreRequest&)>& change) {
    return error_of([&](auto& b) {
      b.transfers.store = {read};
      change(b.transfers.store[0]);
    });
  };
  EXPECT_EQ(error_of_read([](auto&) {}), "");
  EXPECT_THAT(error_of_read([](auto& r) { r.host_slot = 8; }),
              HasSubstr("a record's slot is 8, not 0 to 7"));
  EXPECT_THAT(error_of_read([](auto& r) { r.host_slot = -1; }), HasSubstr("a record's slot is -1"));
  EXPECT_THAT(error_of_read([](auto& r) { r.record.token_ids[9] = 70; }),
              HasSubstr("a record is none"));
  EXPECT_THAT(error_of_read([](auto& r) { r.record.num_tokens = 300; }),
              HasSubstr("a record is none"));
  StepLimits no_disk = TestLimits();
  no_disk.has_disk = false;
  request::ScheduledBatch reads;
  reads.transfers.store = {read};
  const std::vector<request::ScheduledBatch> both = {reads, {}};
  EXPECT_THAT(PlanDecoder(no_disk)
                  .Decode(PlanEncoder().Encode(both, std::vector<std::vector<TokenMask>>(2)))
                  .status()
                  .message(),
              HasSubstr("the number of records is 1, not 0 to 0"));
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
      NodeReports reports;
      reports.result_ranks = seed % 2 == 0 ? std::vector<size_t>{1} : std::vector<size_t>{0, 1};
      const std::string bytes = EncodeResults(reports, sent);
      OpenStoreRequests open(reports);
      std::vector<request::StepResult> results(2);
      const auto decode = [&](std::string_view text) {
        return DecodeResults(text, TestLimits(), reports, step.batches, open, results);
      };
      const Status status = decode(bytes);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(EncodeResults(reports, results), bytes);
      for (const size_t d : reports.result_ranks) {
        ASSERT_EQ(results[d].sequences.size(), sent[d].sequences.size());
        for (size_t s = 0; s < sent[d].sequences.size(); ++s) {
          EXPECT_EQ(results[d].sequences[s].sampled_token_ids,
                    sent[d].sequences[s].sampled_token_ids);
          EXPECT_EQ(results[d].sequences[s].status.message(),
                    sent[d].sequences[s].status.message());
        }
      }
      EXPECT_FALSE(decode(bytes + "x").ok());
      EXPECT_FALSE(decode(std::string_view(bytes).substr(1)).ok());
    }
  }
}

TEST(StepCodec, NewsOfADiskArriveAndMustHaveBeenAskedFor) {
  using Kind = request::KvStoreEvent::Kind;
  using request::KvStoreEvent;
  // Data rank 1 has two ranks of the node.
  const NodeReports reports{.result_ranks = {}, .num_disk_ranks = {0, 2}};
  std::vector<request::ScheduledBatch> batches(2);
  request::KvRecord block{.hash = {5, 6}, .parent = {7, 8}, .num_tokens = 512};
  block.token_ids.assign(256, 9);
  const request::KvRecord snapshot{
      .kind = request::KvRecord::Kind::kSnapshot, .hash = {5, 6}, .num_tokens = 512};
  batches[1].transfers.store = {{request::KvStoreRequest::Kind::kRead, block, 3},
                                {request::KvStoreRequest::Kind::kWrite, snapshot, 1},
                                {request::KvStoreRequest::Kind::kDelete, block, -1}};
  const KvStoreEvent read{.kind = Kind::kRead, .record = block, .host_slot = 3, .ok = true};
  const KvStoreEvent written{
      .kind = Kind::kWrite, .record = snapshot, .host_slot = 1, .file_bytes = 99, .num_ranks = 2};
  const KvStoreEvent found{.kind = Kind::kFound, .record = block, .file_bytes = 7, .num_ranks = 2};
  const KvStoreEvent indexed{.kind = Kind::kIndexed, .num_ranks = 2};
  const KvStoreEvent off{.kind = Kind::kOff};
  const auto accepts = [&](const std::vector<KvStoreEvent>& events) {
    OpenStoreRequests open(reports);
    open.Add(batches);
    std::vector<request::StepResult> sent(2), results(2);
    sent[1].store_events = events;
    results[1].store_events = {off};  // of another node
    const std::string bytes = EncodeResults(reports, sent);
    const Status status = DecodeResults(bytes, TestLimits(), reports, batches, open, results);
    if (!status.ok()) return false;
    EXPECT_EQ(results[1].store_events.size(), events.size() + 1);
    for (size_t i = 0; i < events.size(); ++i) {
      const KvStoreEvent& event = results[1].store_events[i + 1];
      EXPECT_EQ(event.kind, events[i].kind);
      EXPECT_EQ(event.record, events[i].record);
      EXPECT_EQ(event.host_slot, events[i].host_slot);
      EXPECT_EQ(event.file_bytes, events[i].file_bytes);
      EXPECT_EQ(event.ok, events[i].ok);
      EXPECT_EQ(event.num_ranks, events[i].num_ranks);
    }
    return true;
  };
  EXPECT_TRUE(accepts({}));
  EXPECT_TRUE(accepts({found, indexed, read, written, read, off}));
  EXPECT_FALSE(accepts({read, read, read})) << "more ranks than there are";
  EXPECT_FALSE(accepts({written, written}));
  EXPECT_FALSE(accepts({indexed, indexed}));
  KvStoreEvent wrong = read;
  wrong.host_slot = 4;
  EXPECT_FALSE(accepts({wrong})) << "a slot that nobody asked for";
  wrong = read;
  wrong.kind = Kind::kWrite;
  EXPECT_FALSE(accepts({wrong})) << "a write that was a read";
  for (const int num_ranks : {0, -1, 3}) {
    wrong = found;
    wrong.num_ranks = num_ranks;
    EXPECT_FALSE(accepts({wrong}));
  }
  wrong = found;
  wrong.record.token_ids[0] = 70;
  EXPECT_FALSE(accepts({wrong})) << "a token that there is not";
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
  EXPECT_FALSE(decoded->disk_key);
  plan.disk_key = kv_cache::HashKey{1, 2, 3};
  EXPECT_FALSE(DecodeKvPlan(EncodeKvPlan(plan), options, own).ok()) << "a disk on node 0 alone";
  options.kv.disk_directory = "/kv";
  EXPECT_EQ(DecodeKvPlan(EncodeKvPlan(plan), options, own)->disk_key, plan.disk_key);
  plan.pools.num_blocks = 42;
  EXPECT_THAT(DecodeKvPlan(EncodeKvPlan(plan), options, own).status().message(),
              HasSubstr("start all nodes with the same flags"));
}

}  // namespace
}  // namespace fathom::engine
