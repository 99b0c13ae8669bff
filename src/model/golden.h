// Stored expectations (tests/golden) for tests: one safetensors file, its tensors as floats or
// bytes, and the comparison that its README states. Tests only; a missing file or tensor ends the
// test program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors_header.h"
#include "kernels/activation.h"
#include "kernels/weight_matrix.h"

namespace fathom::model {

class GoldenFile {
 public:
  // `name` below tests/golden, without .safetensors.
  explicit GoldenFile(const std::string& name);

  const checkpoint::TensorInfo& Info(const std::string& name) const;
  std::span<const std::byte> Bytes(const std::string& name) const;
  std::vector<float> Floats(const std::string& name) const;  // F32, BF16 and F8_E4M3
  std::vector<int32_t> Ints(const std::string& name) const;
  // An input as activations.
  template <typename T>
  std::vector<T> Activations(const std::string& name) const {
    std::vector<T> out;
    for (const float x : Floats(name)) out.push_back(kernels::FromFloat<T>(x));
    return out;
  }
  std::vector<BFloat16> BFloat16s(const std::string& name) const {
    return Activations<BFloat16>(name);
  }
  // A view of this file's bytes: BF16 or F32 alone, FP8 and FP4 with a scale.
  kernels::WeightMatrix Matrix(const std::string& weight, const std::string& scale = "") const;

  // official.NAME or fp32.NAME, or NAME where both numerics agree.
  template <typename T>
  std::vector<float> Expected(const std::string& name) const {
    const std::string with_mode = (kernels::kIsOfficial<T> ? "official." : "fp32.") + name;
    return Floats(Has(with_mode) ? with_mode : name);
  }

 private:
  bool Has(const std::string& name) const;

  std::string data_;
  std::vector<checkpoint::TensorPlace> places_;
};

// BF16: at least 99.9% bit-equal, the rest one unit in the last place; a value that cancels to
// nearly nothing has the FP32 error of its terms, 2^-22 of the root mean square. FP32: within 1e-5
// of the root mean square.
void ExpectMatches(std::span<const BFloat16> actual, std::span<const float> expected);
void ExpectMatches(std::span<const float> actual, std::span<const float> expected);
template <typename T>
void ExpectMatches(const std::vector<T>& actual, const std::vector<float>& expected) {
  ExpectMatches(std::span<const T>(actual), std::span<const float>(expected));
}

}  // namespace fathom::model
