// A boundary on a rank, of random streams and weights that are the same on every rank. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/float_types.h"
#include "comm/cuda_testing.h"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"

namespace fathom::comm {

inline std::vector<BFloat16> RandomValues(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<BFloat16> values(static_cast<size_t>(count));
  for (BFloat16& v : values)
    v = BFloat16(static_cast<float>(static_cast<int32_t>(random())) * 0x1p-30f);
  return values;
}

// The streams behind a boundary, and its input of the next sub-layer.
struct BoundaryBits {
  std::vector<BFloat16> streams, h;
};

inline void ExpectSameBits(const BoundaryBits& actual, const BoundaryBits& expected,
                           int64_t tokens) {
  const auto same = [](const std::vector<BFloat16>& a, const std::vector<BFloat16>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(BFloat16)) == 0;
  };
  EXPECT_TRUE(same(actual.streams, expected.streams)) << "streams of " << tokens << " tokens";
  EXPECT_TRUE(same(actual.h, expected.h)) << "input of " << tokens << " tokens";
}

class TestBoundary {
 public:
  TestBoundary(const TestRank& rank, int64_t tokens, int64_t hidden)
      : rank_(rank),
        tokens_(tokens),
        hidden_(hidden),
        groups_((tokens + 7) / 8),
        before_(rank.Upload(RandomValues(tokens * 4 * hidden, 5))),
        streams_(rank.Poisoned(tokens * 4 * hidden * 2)),
        fn_(Floats(24 * 4 * hidden, 0.01f, 6)),
        scale_(Floats(3, 1, 7)),
        base_(Floats(24, 1, 8)),
        post_(Floats(tokens * 4, 1, 9)),
        comb_(Floats(tokens * 16, 1, 10)),
        norm_(rank.Upload(RandomValues(hidden, 11))),
        post_out_(rank.Poisoned(tokens * 16)),
        comb_out_(rank.Poisoned(tokens * 64)),
        final_out_(rank.Poisoned(tokens * 64)),
        h_(rank.Poisoned(groups_ * 8 * hidden * 2)),
        scratch_(rank.Poisoned(kernels::BoundaryScratchFloats(tokens, hidden) * 4)),
        codes_(rank.Poisoned(groups_ * 8 * hidden)),
        scales_(rank.Poisoned(groups_ * 8 * hidden / 32)) {}

  // The streams as they were at first.
  void Reset() const {
    CHECK_EQ(cudaMemcpyAsync(streams_.data(), before_.data(),
                             static_cast<size_t>(tokens_ * 4 * hidden_ * 2),
                             cudaMemcpyDeviceToDevice, rank_.cuda_stream()),
             cudaSuccess);
  }
  void Enqueue(const kernels::SublayerOutput& output, const kernels::OutputExchange& gather) const {
    kernels::Launch(
        kernels::CudaHyperConnectionParams{
            .streams = As<__nv_bfloat16>(streams_),
            .num_tokens = tokens_,
            .hidden = hidden_,
            .output = output,
            .gather = gather,
            .before = {As<float>(post_), As<float>(comb_), As<float>(comb_)},
            .fn = As<float>(fn_),
            .scale = As<float>(scale_),
            .base = As<float>(base_),
            .norm_weight = As<__nv_bfloat16>(norm_),
            .constants = {1e-6f, 1e-6f, 20},
            .after = {As<float>(post_out_), As<float>(comb_out_), As<float>(final_out_)},
            .h = {As<__nv_bfloat16>(h_), groups_},
            .h_fp8 = {As<uint8_t>(codes_), As<float>(scales_), groups_},
            .scratch = As<float>(scratch_)},
        *rank_.stream);
  }
  BoundaryBits Bits() const {
    return {
        rank_.Download<BFloat16>(streams_.data(), static_cast<size_t>(tokens_ * 4 * hidden_)),
        rank_.Download<BFloat16>(h_.data(), static_cast<size_t>(groups_ * 8 * hidden_)),
    };
  }

 private:
  template <typename T>
  static T* As(const device::Buffer& buffer) {
    return reinterpret_cast<T*>(buffer.data());
  }
  device::Buffer Floats(int64_t count, float scale, uint32_t seed) const {
    std::vector<float> values;
    for (const BFloat16 v : RandomValues(count, seed)) {
      values.push_back(scale * static_cast<float>(v));
    }
    return rank_.Upload(values);
  }

  const TestRank& rank_;
  const int64_t tokens_, hidden_, groups_;
  const device::Buffer before_, streams_, fn_, scale_, base_, post_, comb_, norm_, post_out_,
      comb_out_, final_out_, h_, scratch_, codes_, scales_;
};

// Once, as a step of its own.
inline BoundaryBits RunBoundary(TestRank& rank, int64_t tokens, int64_t hidden,
                                const kernels::SublayerOutput& output,
                                const kernels::OutputExchange& gather) {
  const TestBoundary boundary(rank, tokens, hidden);
  boundary.Reset();
  boundary.Enqueue(output, gather);
  rank.collectives->EndStep(*rank.stream);
  return boundary.Bits();
}

}  // namespace fathom::comm
