// Tokens a second of the model alone: one prefill in chunks of 512, then one stream decoding after
// it.
//   model_bench FOLDER [official|fp32] [threads]    weights are random; FOLDER gives the config
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "model/testing.h"

namespace fathom::model {
namespace {

constexpr int kPrefill = 2048, kChunk = 512, kDecode = 256;

int Run(const char* folder, config::Numerics numerics, int threads) {
  const auto config = checkpoint::LoadModelConfig(folder);
  if (!config.ok()) {
    std::fprintf(stderr, "%s\n", config.status().message().c_str());
    return ExitCode(config.status());
  }
  TestModel model(*config, numerics, threads, 1, kPrefill + kDecode);
  model.set_last_logits_only();
  TestSequence sequence = model.Add(RandomTokens(*config, kPrefill + kDecode, 1));
  const SystemClock clock;
  TestSequence* const sequences[] = {&sequence};
  const auto run = [&](int tokens, int step) {
    const TimePoint start = clock.Now();
    for (int done = 0; done < tokens; done += step) {
      const int counts[] = {std::min(step, tokens - done)};
      model.Step(sequences, counts);
    }
    return tokens / Seconds(clock.Now() - start);
  };
  const double prefill = run(kPrefill, kChunk);
  const double decode = run(kDecode, 1);
  std::printf(
      "%s, %d threads: prefill %.0f tokens/s (%d in chunks of %d), decode %.1f tokens/s (one "
      "stream)\n",
      numerics == config::Numerics::kOfficial ? "official" : "fp32", threads, prefill, kPrefill,
      kChunk, decode);
  return 0;
}

}  // namespace
}  // namespace fathom::model

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: model_bench FOLDER [official|fp32] [threads]\n");
    return 2;
  }
  const bool fp32 = argc > 2 && std::strcmp(argv[2], "fp32") == 0;
  const int threads = argc > 3 ? std::atoi(argv[3]) : fathom::NumUsableCores();
  return fathom::model::Run(
      argv[1], fp32 ? fathom::config::Numerics::kFp32 : fathom::config::Numerics::kOfficial,
      std::max(threads, 1));
}
