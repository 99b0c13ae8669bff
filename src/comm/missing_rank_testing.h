// What the others say of a rank that did not come, whatever carries their exchanges. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "comm/cuda_collectives.h"

namespace fathom::comm {

inline void ExpectMissingIsNamed(CudaCollectives& collectives, int missing) {
  const Status status = collectives.Check();
  EXPECT_EQ(status.code(), StatusCode::kPeer);
  EXPECT_NE(status.message().find("rank " + std::to_string(missing) + " (GPU"), std::string::npos)
      << status.message();
}

}  // namespace fathom::comm
