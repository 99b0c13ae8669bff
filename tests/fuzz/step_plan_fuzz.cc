// What nodes tell each other: any bytes give an error, or what the limits allow. The first byte
// says which kind of message; plans follow each other, each behind its length in two bytes.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "engine/rank_runtime.h"
#include "engine/testing_steps.h"
#include "runtime/device_batch.h"

namespace fathom::engine {
namespace {

void RunPlans(std::string_view bytes) {
  PlanDecoder decoder(TestLimits());
  runtime::DeviceBatch device_batch;
  while (bytes.size() >= 2) {
    const size_t size = static_cast<uint8_t>(bytes[0]) + 256u * static_cast<uint8_t>(bytes[1]);
    const auto batches = decoder.Decode(bytes.substr(2, size));
    if (!batches.ok()) return;
    bytes.remove_prefix(std::min(bytes.size(), 2 + size));
    for (const request::ScheduledBatch& batch : *batches) {
      CHECK_LE(batch.num_tokens(), TestLimits().max_num_batched_tokens);
      device_batch.Clear();
      for (const request::ScheduledSequence& s : batch.sequences) {
        device_batch.AddSequence(s.token_ids, s.num_computed_tokens, s.block_table);
        if (s.sample) device_batch.AddLogitsRow(s.token_ids.size() - 1);
        CHECK(!s.sample || s.num_output_tokens() < s.all_token_ids.size());
      }
      (void)device_batch.View();
    }
  }
}

void RunResults(std::string_view bytes) {
  RandomSteps steps(1);
  const RandomSteps::Step& step = steps.Next();
  const NodeReports reports{.result_ranks = {0, 1}, .num_disk_ranks = {2, 1}};
  OpenStoreRequests open(reports);
  open.Add(step.batches);
  std::vector<request::StepResult> results(2);
  const Status status = DecodeResults(bytes, TestLimits(), reports, step.batches, open, results);
  if (status.ok()) CHECK_EQ(results[1].sequences.size(), step.batches[1].sequences.size());
}

void RunSetup(std::string_view bytes) {
  const auto memory = DecodeMemory(bytes, 1);
  if (!memory.ok()) return;
  EngineOptions options;
  options.limits = {.max_batched_tokens = 512, .max_num_seqs = 4, .max_model_len = 4096};
  const auto plan = PlanKv(options, *memory);
  if (plan.ok()) CHECK(DecodeKvPlan(EncodeKvPlan(*plan), options, *memory).ok());
}

}  // namespace
}  // namespace fathom::engine

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'p') fathom::engine::RunPlans(bytes);
  if (data[0] == 'r') fathom::engine::RunResults(bytes);
  if (data[0] == 'm') fathom::engine::RunSetup(bytes);
  if (data[0] == 'k') {
    const std::vector<fathom::engine::RankMemory> own(1);
    (void)fathom::engine::DecodeKvPlan(bytes, {}, own);
  }
  return 0;
}
