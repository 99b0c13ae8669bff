#include "api/openai/routed_experts.h"

#include <gtest/gtest.h>

#include "api/base64.h"

namespace fathom::api::openai {
namespace {

ModelInfo Model(int num_experts) {
  ModelInfo model;
  model.num_layers = 2;
  model.num_experts = num_experts;
  model.num_experts_per_token = 3;
  return model;
}

constexpr uint16_t kIds[] = {0, 1, 2, 253, 254, 255, 9, 10, 11, 7, 8, 258};

TEST(RoutedExperts, AreANumpyFileOfBytes) {
  const std::string file = FromBase64(EncodeRoutedExperts(kIds, 1, Model(256))).value();
  ASSERT_EQ(file.size(), 128u + 6u);
  EXPECT_EQ(file.substr(0, 10), std::string("\x93NUMPY\x01\x00\x76\x00", 10));
  EXPECT_EQ(file.substr(10, 61), "{'descr': '|u1', 'fortran_order': False, 'shape': (1, 2, 3), ");
  EXPECT_EQ(file.substr(125), std::string("  \n\x00\x01\x02\xfd\xfe\xff", 9));
}

TEST(RoutedExperts, TakeTwoBytesWhereTheModelHasMoreThan256) {
  const std::string file = FromBase64(EncodeRoutedExperts(kIds, 9, Model(384))).value();
  ASSERT_EQ(file.size(), 128u + 24u);
  EXPECT_NE(file.find("'<u2'"), std::string::npos);
  EXPECT_NE(file.find("(2, 2, 3)"), std::string::npos);
  EXPECT_EQ(file.substr(128 + 22), "\x02\x01");
}

TEST(RoutedExperts, MayBeNone) {
  const std::string file = FromBase64(EncodeRoutedExperts({}, 0, Model(256))).value();
  EXPECT_NE(file.find("(0, 2, 3)"), std::string::npos);
  EXPECT_EQ(file.size(), 128u);
}

}  // namespace
}  // namespace fathom::api::openai
