#include "kernels/embedding/embedding.h"

#include <gtest/gtest.h>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

TEST(Embedding, EveryStreamGetsTheTokensRow) {
  const TestMatrix table = RandomMatrix(WeightDType::kBF16, 10, 24, 1);
  const std::vector<int32_t> ids{9, 0, 9};
  std::vector<BFloat16> streams(3 * 4 * 24);
  const auto device = device::MakeCpuDevice(2);
  const auto stream = std::move(device->MakeStream().value());
  Launch(EmbeddingParams<BFloat16>{.token_ids = ids.data(),
                                   .num_tokens = 3,
                                   .table = table.view,
                                   .num_streams = 4,
                                   .streams = streams.data()},
         *stream);
  for (size_t t = 0; t < 3; ++t) {
    for (size_t s = 0; s < 4; ++s) {
      for (size_t i = 0; i < 24; ++i) {
        EXPECT_EQ(ToFloat(streams[(t * 4 + s) * 24 + i]),
                  table.values[static_cast<size_t>(ids[t]) * 24 + i]);
      }
    }
  }
}

}  // namespace
}  // namespace fathom::kernels
