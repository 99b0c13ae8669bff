// Time of a step on a GPU with dummy weights of real shapes.
//   cuda_model_bench CONFIG_FOLDER LAYERS CONTEXT TOKENS...   decode steps of TOKENS sequences
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/clock.h"
#include "checkpoint/checkpoint.h"
#include "model/deepseek_v4_cuda.h"
#include "model/dummy_values.h"
#include "model/roofline.h"

namespace fathom::model {
namespace {

int Run(int argc, char** argv) {
  auto config = checkpoint::LoadModelConfig(argv[1]);
  if (!config.ok()) return std::fprintf(stderr, "%s\n", config.status().message().c_str()), 4;
  config->num_layers = std::atoi(argv[2]);
  config->compress_ratios.resize(static_cast<size_t>(config->num_layers));
  config->draft = config::DraftKind::kNone;
  config->num_draft_blocks = 0;
  const auto context = std::atoi(argv[3]);
  std::vector<int> sizes;
  for (int i = 4; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  const int most = *std::max_element(sizes.begin(), sizes.end());

  const SystemClock clock;
  auto device = std::move(device::MakeCudaDevice(0).value());
  const auto stream = std::move(device->MakeStream().value());
  const auto host = device::MakeCpuDevice(4);
  const auto source = checkpoint::MakeSyntheticSource(*config, 1);
  auto weights = PlaceWeights(*config, *source, *host);
  const TimePoint start = clock.Now();
  const ModelLimits limits{.max_batched_tokens = std::max(most, 8),
                           .max_num_seqs = most,
                           .max_model_len = context + 512};
  auto model =
      MakeDeepSeekV4Cuda(*config, kv_cache::IndexKeyDType::kFp4, **weights, true, limits, *device);
  if (!model.ok()) return std::fprintf(stderr, "%s\n", model.status().message().c_str()), 3;
  std::printf("weights made in %.2f s\n", Seconds(clock.Now() - start));
  const auto layout =
      kv_cache::MakeKvLayout(*config, config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4);
  const int blocks_each = context / 256 + 1, pages_each = 4;
  const auto blocks = device->Allocate(int64_t{most} * blocks_each * layout.block_bytes);
  const auto pages = device->Allocate(int64_t{most} * pages_each * layout.window_page_bytes);
  const auto slots = device->Allocate(int64_t{most} * layout.state.slot_bytes);
  const auto logits = device->Allocate(int64_t{most} * config->vocab_size * 4);
  for (const auto* buffer : {&blocks, &pages}) {
    FillDummy(DummyKind::kCache, (*buffer)->data(), (*buffer)->bytes(), 7, 1, *stream);
  }
  for (const int n : sizes) {
    std::vector<int32_t> ids, cu{0}, computed, tables, windows, first, states, rows;
    for (int s = 0; s < n; ++s) {
      ids.push_back(s * 37 % config->vocab_size);
      cu.push_back(s + 1);
      computed.push_back(context);
      for (int i = 0; i < blocks_each; ++i) tables.push_back(s * blocks_each + i);
      for (int i = 0; i < pages_each; ++i) windows.push_back(s * pages_each + i);
      first.push_back((context - 127) / 64);
      states.push_back(s);
      rows.push_back(s);
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
                         .logits_rows = rows},
                        {blocks->data(), pages->data(), slots->data()},
                        reinterpret_cast<float*>(logits->data()), *stream, nullptr);
    };
    for (int i = 0; i < 5; ++i) step();
    if (!stream->Synchronize().ok()) return 5;
    std::vector<double> times;
    for (int i = 0; i < 30; ++i) {
      const TimePoint begin = clock.Now();
      step();
      if (!stream->Synchronize().ok()) return 5;
      times.push_back(Seconds(clock.Now() - begin));
    }
    std::nth_element(times.begin(), times.begin() + 15, times.end());
    std::printf("%d layers, context %d, %d sequences: %.3f ms a step\n", config->num_layers,
                context, n, times[15] * 1e3);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace fathom::model

int main(int argc, char** argv) { return argc < 5 ? 2 : fathom::model::Run(argc, argv); }
