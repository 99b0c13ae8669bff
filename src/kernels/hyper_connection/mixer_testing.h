// Random weights of a hyper-connection's mixer, for tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/testing.h"

namespace fathom::kernels {

struct TestMixer {
  TestMatrix fn;
  std::vector<float> scale, base;
  std::vector<BFloat16> norm;
};

// Of `mixes` values a token: 24 of a boundary, 4 of the head.
inline TestMixer RandomMixer(int mixes, int64_t hidden, uint32_t seed) {
  TestMixer m{RandomMatrix(WeightDType::kF32, mixes, 4 * hidden, seed), RandomFloats(3, seed + 1),
              RandomFloats(mixes, seed + 2), RandomActivations<BFloat16>(hidden, seed + 3)};
  auto* const values = reinterpret_cast<float*>(m.fn.data.data());
  for (int64_t i = 0; i < mixes * 4 * hidden; ++i) {
    values[i] /= std::sqrt(static_cast<float>(4 * hidden));
  }
  return m;
}

}  // namespace fathom::kernels
