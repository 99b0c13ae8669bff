#include "comm/nccl.h"

#include <gtest/gtest.h>

namespace fathom::comm {
namespace {

TEST(LoadNccl, SaysInOneLineThatThereIsNone) {
  const Status status = LoadNccl("libno-such-nccl.so.2").status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("libno-such-nccl.so.2"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("LD_LIBRARY_PATH"), std::string::npos) << status.message();
  EXPECT_EQ(status.message().find('\n'), std::string::npos);
}

TEST(LoadNccl, NamesTheFunctionThatALibraryLacks) {
  const Status status = LoadNccl("libm.so.6").status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("ncclGetVersion"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace fathom::comm
