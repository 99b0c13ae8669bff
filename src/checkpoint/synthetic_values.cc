#include "checkpoint/synthetic_values.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/float_types.h"

namespace fathom::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t kWordBytes = 8;
constexpr size_t kBatchWords = 512;

// SplitMix64: a bijection of 64 bits that passes the usual test batteries on a counter.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
inline uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// The sum of four uniform integers below n is close to normal; its mean is 2(n - 1), its variance
// (n^2 - 1) / 3.
constexpr int kSumOf16Mean = 2 * 65535;
constexpr float kInverseSumOf16Std = 1.0f / 37837.226f;
constexpr int kSumOf8Mean = 2 * 255;
constexpr float kSumOf8Std = 147.8f;

inline float UnitNormal(uint64_t h) {
  const int sum =
      static_cast<int>((h & 0xffff) + ((h >> 16) & 0xffff) + ((h >> 32) & 0xffff) + (h >> 48));
  return static_cast<float>(sum - kSumOf16Mean) * kInverseSumOf16Std;
}

// e4m3 codes of the sums of four bytes; the outermost are +-440, so no code is NaN.
using Fp8Table = std::array<uint8_t, 2 * kSumOf8Mean + 1>;
const Fp8Table& Fp8Codes() {
  static const Fp8Table table = [] {
    Fp8Table t{};
    for (int sum = 0; sum <= 2 * kSumOf8Mean; ++sum) {
      t[static_cast<size_t>(sum)] =
          FloatToFloat8(static_cast<float>(sum - kSumOf8Mean) * (kFp8CodeStd / kSumOf8Std));
    }
    return t;
  }();
  return table;
}

constexpr uint64_t EveryByte(uint8_t b) { return b * 0x0101010101010101ull; }

// Eight e2m1 codes from eight bytes: bit 7 is the sign, the other bits are a magnitude m. As many
// of its 128 values give each code as round to it when the values are N(0, 2^2); their mean square
// is 4 exactly.
inline uint32_t Fp4Codes(uint64_t h) {
  constexpr uint8_t kFirstMagnitude[7] = {13, 38, 60, 79, 101, 118, 126};  // of the codes 1..7
  const uint64_t magnitudes = h & EveryByte(0x7f);
  uint64_t codes = (h >> 4) & EveryByte(0x08);
  for (const uint8_t first : kFirstMagnitude) {
    codes += ((magnitudes + EveryByte(static_cast<uint8_t>(128 - first))) >> 7) & EveryByte(1);
  }
  codes = (codes | (codes >> 4)) & 0x00ff00ff00ff00ffull;
  codes = (codes | (codes >> 8)) & 0x0000ffff0000ffffull;
  return static_cast<uint32_t>(codes | (codes >> 16));
}

}  // namespace

SyntheticValues::SyntheticValues(const TensorSpec& spec, uint64_t seed)
    : spec_(spec), key_(XXH3_64bits_withSeed(spec.info.name.data(), spec.info.name.size(), seed)) {
  if (spec.values.pattern != Pattern::kScales) return;
  // Scales 2^e and 2^(e+1), mixed so that the mean square of code * scale is std^2.
  const float ratio = spec.values.std / spec.values.code_std;
  int exponent = 0;
  const float mantissa = 2 * std::frexp(ratio, &exponent);  // in [1, 2)
  CHECK_GT(exponent, -120);
  CHECK_LT(exponent, 120);
  scale_base_ = static_cast<uint8_t>(exponent - 1 + 127);
  scale_threshold_ = static_cast<uint32_t>(std::lround((mantissa * mantissa - 1) * (256.0f / 3)));
}

uint64_t SyntheticValues::Hash(uint64_t counter) const {
  return Mix(key_ + (counter + 1) * kGolden);
}

void SyntheticValues::Fill(int64_t offset, std::span<std::byte> out) const {
  auto word = static_cast<uint64_t>(offset) / kWordBytes;
  size_t skip = static_cast<size_t>(offset) % kWordBytes;
  std::array<uint64_t, kBatchWords> batch;
  while (!out.empty()) {
    const size_t words = std::min(kBatchWords, (skip + out.size() + kWordBytes - 1) / kWordBytes);
    FillWords(word, std::span(batch).first(words));
    const size_t bytes = std::min(out.size(), words * kWordBytes - skip);
    std::memcpy(out.data(), reinterpret_cast<const std::byte*>(batch.data()) + skip, bytes);
    out = out.subspan(bytes);
    word += words;
    skip = 0;
  }
}

void SyntheticValues::FillWords(uint64_t first, std::span<uint64_t> out) const {
  const auto fill = [&](auto&& value_of) {
    for (size_t i = 0; i < out.size(); ++i) out[i] = value_of(first + i);
  };
  switch (spec_.values.pattern) {
    case Pattern::kNormal:
    case Pattern::kHcBase:
      return fill([this](uint64_t word) { return NormalWord(word); });
    case Pattern::kFp8Codes:
      return fill([this](uint64_t word) { return Fp8Word(word); });
    case Pattern::kFp4Codes:
      return fill([this](uint64_t word) { return Fp4Word(word); });
    case Pattern::kScales:
      return fill([this](uint64_t word) { return ScaleWord(word); });
    case Pattern::kExpertIds:
      return fill([this](uint64_t word) { return ExpertId(word); });
  }
}

uint64_t SyntheticValues::NormalWord(uint64_t word) const {
  uint64_t packed = 0;
  if (spec_.info.dtype == FileDType::kF32) {
    for (uint64_t i = 0; i < 2; ++i) {
      packed |= uint64_t{std::bit_cast<uint32_t>(NormalAt(2 * word + i))} << (32 * i);
    }
  } else {
    for (uint64_t i = 0; i < 4; ++i) {
      packed |= uint64_t{BFloat16(NormalAt(4 * word + i)).bits} << (16 * i);
    }
  }
  return packed;
}

float SyntheticValues::NormalAt(uint64_t element) const {
  return MeanAt(element) + spec_.values.std * UnitNormal(Hash(element));
}

float SyntheticValues::MeanAt(uint64_t element) const {
  if (spec_.values.pattern != Pattern::kHcBase) return spec_.values.mean;
  // pre: sigmoid(-ln 3) = 1/4, the mean of four streams; post: 2 sigmoid(0) = 1; then the 4x4
  // logits of the mixing matrix, whose diagonal stands out.
  if (element < 4) return -1.0986123f;
  if (element < 8) return 0;
  return (element - 8) % 5 == 0 ? 3.0f : 0.0f;
}

uint64_t SyntheticValues::Fp8Word(uint64_t word) const {
  const Fp8Table& codes = Fp8Codes();
  uint64_t packed = 0;
  for (uint64_t i = 0; i < 4; ++i) {
    const uint64_t h = Hash(4 * word + i);
    const uint64_t pairs = (h & 0x00ff00ff00ff00ffull) + ((h >> 8) & 0x00ff00ff00ff00ffull);
    const uint64_t sums = (pairs & 0x0000ffff0000ffffull) + ((pairs >> 16) & 0x0000ffff0000ffffull);
    packed |= uint64_t{codes[sums & 0xffff]} << (16 * i);
    packed |= uint64_t{codes[sums >> 32]} << (16 * i + 8);
  }
  return packed;
}

uint64_t SyntheticValues::Fp4Word(uint64_t word) const {
  return Fp4Codes(Hash(2 * word)) | (uint64_t{Fp4Codes(Hash(2 * word + 1))} << 32);
}

uint64_t SyntheticValues::ScaleWord(uint64_t word) const {
  const uint64_t h = Hash(word);
  uint64_t packed = 0;
  for (uint64_t i = 0; i < 8; ++i) {
    const uint64_t step = ((h >> (8 * i)) & 0xff) < scale_threshold_ ? 1 : 0;
    packed |= (scale_base_ + step) << (8 * i);
  }
  return packed;
}

uint64_t SyntheticValues::ExpertId(uint64_t element) const {
  // One id from each of k equal ranges of the experts, so that a row's ids differ; then the whole
  // row is rotated, so that every expert is equally likely.
  const auto num_experts = static_cast<uint64_t>(spec_.values.num_experts);
  const auto k = static_cast<uint64_t>(spec_.info.shape[1]);
  const uint64_t row = element / k;
  const uint64_t column = element % k;
  const uint64_t begin = num_experts * column / k;
  const uint64_t end = num_experts * (column + 1) / k;
  const uint64_t pick = begin + Hash(element) % (end - begin);
  const uint64_t rotation = Mix(Hash(row) ^ kGolden) % num_experts;
  return (pick + rotation) % num_experts;
}

}  // namespace fathom::checkpoint
