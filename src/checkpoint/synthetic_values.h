// Values of a synthetic tensor, made on demand: every 8 bytes of it are a pure function of the
// seed, the tensor's name and their place, so any range can be made on any thread. Integer
// arithmetic and single FP32 roundings only: the same bytes on every machine. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "checkpoint/tensor_specs.h"

namespace fathom::checkpoint {

// Standard deviation of the drawn codes, as values.
inline constexpr float kFp8CodeStd = 127.5f;
inline constexpr float kFp4CodeStd = 2.0f;

class SyntheticValues {
 public:
  // Keeps a reference to `spec`.
  SyntheticValues(const TensorSpec& spec, uint64_t seed);

  // The tensor's bytes [offset, offset + out.size()).
  void Fill(int64_t offset, std::span<std::byte> out) const;

 private:
  uint64_t Hash(uint64_t counter) const;
  // The 8-byte words [first, first + out.size()) of the tensor.
  void FillWords(uint64_t first, std::span<uint64_t> out) const;
  uint64_t NormalWord(uint64_t word) const;
  float NormalAt(uint64_t element) const;
  float MeanAt(uint64_t element) const;
  uint64_t Fp8Word(uint64_t word) const;
  uint64_t Fp4Word(uint64_t word) const;
  uint64_t ScaleWord(uint64_t word) const;
  uint64_t ExpertId(uint64_t element) const;

  const TensorSpec& spec_;
  uint64_t key_;
  uint8_t scale_base_ = 0;        // kScales: a scale is this byte or the next one, which a random
  uint32_t scale_threshold_ = 0;  // byte below the threshold chooses
};

}  // namespace fathom::checkpoint
