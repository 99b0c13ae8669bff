// Tokens a second of the model alone: one prefill in chunks of 512, then one stream decoding after
// it.
//   model_bench FOLDER [official|fp32] [threads] [prefill tokens] [decoded tokens]
// Weights are random; FOLDER gives the config.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "model/testing.h"

namespace fathom::model {
namespace {

constexpr int kChunk = 512;

int Run(const char* folder, config::Numerics numerics, int threads, int num_prefill,
        int num_decode) {
  const auto config = checkpoint::LoadModelConfig(folder);
  if (!config.ok()) {
    std::fprintf(stderr, "%s\n", config.status().message().c_str());
    return ExitCode(config.status());
  }
  TestModel model(*config, numerics, threads, 1, num_prefill + num_decode);
  model.set_last_logits_only();
  TestSequence sequence = model.Add(RandomTokens(*config, num_prefill + num_decode, 1));
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
  const double prefill = run(num_prefill, kChunk);
  const double decode = run(num_decode, 1);
  std::printf(
      "%s, %d threads: prefill %.0f tokens/s (%d in chunks of %d), decode %.1f tokens/s (one "
      "stream)\n",
      numerics == config::Numerics::kOfficial ? "official" : "fp32", threads, prefill, num_prefill,
      kChunk, decode);
  return 0;
}

}  // namespace
}  // namespace fathom::model

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(
        stderr,
        "usage: model_bench FOLDER [official|fp32] [threads] [prefill tokens] [decoded tokens]\n");
    return 2;
  }
  const bool fp32 = argc > 2 && std::strcmp(argv[2], "fp32") == 0;
  const int threads = argc > 3 ? std::atoi(argv[3]) : fathom::NumUsableCores();
  const int num_prefill = argc > 4 ? std::atoi(argv[4]) : 2048;
  const int num_decode = argc > 5 ? std::atoi(argv[5]) : 256;
  return fathom::model::Run(
      argv[1], fp32 ? fathom::config::Numerics::kFp32 : fathom::config::Numerics::kOfficial,
      std::max(threads, 1), num_prefill, num_decode);
}
