#include "model/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "checkpoint/file.h"

namespace fathom::model {
namespace {

using checkpoint::FileDType;
using checkpoint::TensorPlace;

// Distance in representable BF16 values.
int Distance(BFloat16 a, BFloat16 b) {
  const auto ordered = [](BFloat16 x) {
    return (x.bits & 0x8000u) != 0 ? -static_cast<int>(x.bits & 0x7fffu) : static_cast<int>(x.bits);
  };
  return std::abs(ordered(a) - ordered(b));
}

double RootMeanSquare(std::span<const float> values) {
  double squares = 0;
  for (const float x : values) squares += double{x} * x;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

}  // namespace

GoldenFile::GoldenFile(const std::string& name) {
  const std::string path =
      std::string(FATHOM_SOURCE_DIR) + "/tests/golden/" + name + ".safetensors";
  data_ = checkpoint::ReadSmallFile(path, int64_t{1} << 26).value();
  uint64_t length;
  CHECK_GE(data_.size(), sizeof(length));
  std::memcpy(&length, data_.data(), sizeof(length));
  const std::string header = data_.substr(sizeof(length), length);
  data_.erase(0, sizeof(length) + length);
  places_ =
      checkpoint::ParseSafetensorsHeader(header, static_cast<int64_t>(data_.size()), path).value();
  for (TensorPlace& place : places_) place.offset -= static_cast<int64_t>(sizeof(length) + length);
}

bool GoldenFile::Has(const std::string& name) const {
  return std::any_of(places_.begin(), places_.end(),
                     [&](const TensorPlace& p) { return p.info.name == name; });
}

const checkpoint::TensorInfo& GoldenFile::Info(const std::string& name) const {
  for (const TensorPlace& place : places_) {
    if (place.info.name == name) return place.info;
  }
  CheckFailed(__FILE__, __LINE__, "no tensor " + name);
}

std::span<const std::byte> GoldenFile::Bytes(const std::string& name) const {
  for (const TensorPlace& place : places_) {
    if (place.info.name != name) continue;
    return {reinterpret_cast<const std::byte*>(data_.data()) + place.offset,
            static_cast<size_t>(place.info.bytes)};
  }
  CheckFailed(__FILE__, __LINE__, "no tensor " + name);
}

std::vector<float> GoldenFile::Floats(const std::string& name) const {
  const auto bytes = Bytes(name);
  const FileDType dtype = Info(name).dtype;
  std::vector<float> out(bytes.size() / static_cast<size_t>(BytesPerElement(dtype)));
  for (size_t i = 0; i < out.size(); ++i) {
    if (dtype == FileDType::kF32) {
      std::memcpy(&out[i], bytes.data() + i * 4, 4);
    } else if (dtype == FileDType::kBF16) {
      BFloat16 value;
      std::memcpy(&value, bytes.data() + i * 2, 2);
      out[i] = static_cast<float>(value);
    } else {
      CHECK(dtype == FileDType::kF8E4M3);
      out[i] = Float8ToFloat(static_cast<uint8_t>(bytes[i]));
    }
  }
  return out;
}

std::vector<int32_t> GoldenFile::Ints(const std::string& name) const {
  CHECK(Info(name).dtype == FileDType::kI32);
  const auto bytes = Bytes(name);
  std::vector<int32_t> out(bytes.size() / 4);
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

kernels::WeightMatrix GoldenFile::Matrix(const std::string& weight,
                                         const std::string& scale) const {
  const checkpoint::TensorInfo& info = Info(weight);
  kernels::WeightMatrix m{
      .rows = info.shape[0], .cols = info.shape[1], .data = Bytes(weight).data()};
  if (!scale.empty()) m.scales = reinterpret_cast<const uint8_t*>(Bytes(scale).data());
  if (info.dtype == FileDType::kI8) {
    m.dtype = kernels::WeightDType::kFp4;
    m.cols *= 2;
  } else if (info.dtype == FileDType::kF8E4M3) {
    m.dtype = kernels::WeightDType::kFp8;
  } else if (info.dtype == FileDType::kF32) {
    m.dtype = kernels::WeightDType::kF32;
  }
  return m;
}

void ExpectMatches(std::span<const BFloat16> actual, std::span<const float> expected) {
  ASSERT_EQ(actual.size(), expected.size());
  const double cancelled = 0x1p-22 * RootMeanSquare(expected);
  size_t different = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const int distance = Distance(actual[i], BFloat16(expected[i]));
    different += distance != 0 ? 1 : 0;
    if (std::fabs(static_cast<float>(actual[i]) - expected[i]) <= cancelled) continue;
    ASSERT_LE(distance, 1) << "at " << i << ": " << static_cast<float>(actual[i]) << " instead of "
                           << expected[i];
  }
  EXPECT_LE(static_cast<double>(different), 0.001 * static_cast<double>(actual.size()))
      << different << " of " << actual.size() << " differ";
}

void ExpectMatches(std::span<const float> actual, std::span<const float> expected) {
  ASSERT_EQ(actual.size(), expected.size());
  const double limit = 1e-5 * RootMeanSquare(expected);
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], limit) << "at " << i;
  }
}

}  // namespace fathom::model
