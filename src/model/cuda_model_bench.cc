// Time of a step on a GPU with dummy weights of real shapes.
//   cuda_model_bench CONFIG_FOLDER LAYERS CONTEXT CASE...
// A case is a number of sequences (a decode step), or pN: the next N tokens of one prompt.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/clock.h"
#include "checkpoint/checkpoint.h"
#include "model/deepseek_v4_cuda.h"
#include "model/dummy_kv_cache.h"
#include "model/roofline.h"

namespace fathom::model {
namespace {

// Decode: `seqs` sequences of a token each; prefill: one sequence of `tokens` tokens.
struct Case {
  int seqs, tokens;
};

int Run(int argc, char** argv) {
  auto config = checkpoint::LoadModelConfig(argv[1]);
  if (!config.ok()) return std::fprintf(stderr, "%s\n", config.status().message().c_str()), 4;
  config->num_layers = std::atoi(argv[2]);
  config->compress_ratios.resize(static_cast<size_t>(config->num_layers));
  config->draft = config::DraftKind::kNone;
  config->num_draft_blocks = 0;
  const auto context = std::atoi(argv[3]);
  std::vector<Case> cases;
  for (int i = 4; i < argc; ++i) {
    const bool prefill = argv[i][0] == 'p';
    const int n = std::atoi(argv[i] + (prefill ? 1 : 0));
    cases.push_back(prefill ? Case{1, n} : Case{n, 1});
  }
  int most = 1, most_tokens = 8;
  for (const Case& c : cases) {
    most = std::max(most, c.seqs);
    most_tokens = std::max(most_tokens, c.seqs * c.tokens);
  }

  const SystemClock clock;
  auto device = std::move(device::MakeCudaDevice(0).value());
  const auto stream = std::move(device->MakeStream().value());
  const auto source = checkpoint::MakeSyntheticSource(*config, 1);
  const TimePoint start = clock.Now();
  const ModelLimits limits{.max_batched_tokens = most_tokens,
                           .max_num_seqs = most,
                           .max_model_len = context + most_tokens + 512};
  auto model =
      MakeDeepSeekV4Cuda(*config, kv_cache::IndexKeyDType::kFp4, *source, true, limits, *device);
  if (!model.ok()) return std::fprintf(stderr, "%s\n", model.status().message().c_str()), 3;
  std::printf("weights made in %.2f s\n", Seconds(clock.Now() - start));
  const auto layout =
      kv_cache::MakeKvLayout(*config, config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4);
  const int blocks_each = (context + most_tokens) / 256 + 1, pages_each = most_tokens / 64 + 4;
  const auto blocks = device->Allocate(int64_t{most} * blocks_each * layout.block_bytes);
  const auto pages = device->Allocate(int64_t{most} * pages_each * layout.window_page_bytes);
  const auto slots = device->Allocate(int64_t{most} * layout.state.slot_bytes);
  const auto logits = device->Allocate(int64_t{most} * config->vocab_size * 4);
  FillDummyKvCache(*config, layout, kv_cache::IndexKeyDType::kFp4,
                   {blocks->data(), pages->data(), slots->data()}, int64_t{most} * blocks_each,
                   int64_t{most} * pages_each, *stream);
  for (const Case& c : cases) {
    const int n = c.seqs;
    std::vector<int32_t> ids, cu{0}, computed, tables, windows, first, states, rows;
    for (int s = 0; s < n; ++s) {
      for (int t = 0; t < c.tokens; ++t) ids.push_back((s + t) * 37 % config->vocab_size);
      cu.push_back((s + 1) * c.tokens);
      computed.push_back(context);
      for (int i = 0; i < blocks_each; ++i) tables.push_back(s * blocks_each + i);
      for (int i = 0; i < pages_each; ++i) windows.push_back(s * pages_each + i);
      first.push_back(std::max(0, context - 127) / 64);
      states.push_back(s);
      rows.push_back((s + 1) * c.tokens - 1);
    }
    const auto step = [&] {
      (*model)->Forward({.token_ids = ids,
                         .cu_seqlens_q = cu,
                         .num_computed = computed,
                         .block_tables = tables,
                         .max_blocks = blocks_each,
                         .window_tables = windows,
                         .max_window_pages = pages_each,
                         .first_window_page = first,
                         .state_slots = states,
                         .logits_rows = rows,
                         .expert_ids = {}},
                        {blocks->data(), pages->data(), slots->data()},
                        reinterpret_cast<float*>(logits->data()), *stream, nullptr);
    };
    const int repeats = c.tokens > 1 ? 3 : 30;
    for (int i = 0; i < std::min(repeats, 5); ++i) step();
    if (!stream->Synchronize().ok()) return 5;
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      const TimePoint begin = clock.Now();
      step();
      if (!stream->Synchronize().ok()) return 5;
      times.push_back(Seconds(clock.Now() - begin));
    }
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    const double seconds = times[static_cast<size_t>(repeats / 2)];
    const RooflineTime floor = Price(StepCosts(*config, layout,
                                               {.num_seqs = n,
                                                .tokens_per_seq = c.tokens,
                                                .context_tokens = context,
                                                .logits_rows = n}),
                                     H200Ceilings());
    std::printf(
        "%d layers, context %d, %d sequences of %d tokens: %.3f ms a step, floor %.3f ms, %.1f%%\n",
        config->num_layers, context, n, c.tokens, seconds * 1e3, floor.floor_us() * 1e-3,
        floor.floor_us() * 1e-4 / seconds);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace fathom::model

int main(int argc, char** argv) { return argc < 5 ? 2 : fathom::model::Run(argc, argv); }
