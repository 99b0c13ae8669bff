// Fp8Experts: a checkpoint whose experts are FP4, shown as one of FP8 experts with the same values:
// a code becomes the one of its value times its group's scale over the block's. Tests only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/float_types.h"
#include "checkpoint/checkpoint.h"

namespace fathom::model {

class Fp8Experts final : public checkpoint::TensorSource {
 public:
  // `source` outlives it.
  explicit Fp8Experts(const checkpoint::TensorSource& source) : source_(source) {
    for (const checkpoint::TensorInfo& tensor : source.tensors()) {
      if (tensor.name.find(".ffn.experts.") == std::string::npos) {
        tensors_.push_back(tensor);
      } else if (tensor.name.ends_with(".weight")) {
        Convert(tensor.name.substr(0, tensor.name.size() - std::strlen(".weight")));
      }
    }
    std::sort(tensors_.begin(), tensors_.end(),
              [](const auto& a, const auto& b) { return a.name < b.name; });
  }

  const std::vector<checkpoint::TensorInfo>& tensors() const override { return tensors_; }
  const checkpoint::TensorInfo* Find(std::string_view name) const override {
    const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                    [&](const auto& tensor) { return tensor.name == name; });
    return found == tensors_.end() ? nullptr : &*found;
  }
  Status Read(const checkpoint::TensorInfo& tensor, int64_t offset,
              std::span<std::byte> out) const override {
    const auto made = made_.find(tensor.name);
    if (made == made_.end()) return source_.Read(*source_.Find(tensor.name), offset, out);
    std::memcpy(out.data(), made->second.data() + offset, out.size());
    return OkStatus();
  }

 private:
  static constexpr int64_t kGroup = 32, kBlock = 128;
  // The largest FP4 value, 6, times 2^6 is FP8 still; so are FP4's all down to 2^-14 of that.
  static constexpr int kHeadroom = 6, kLeast = -8;

  std::vector<uint8_t> Bytes(const checkpoint::TensorInfo& tensor) const {
    std::vector<uint8_t> bytes(static_cast<size_t>(tensor.bytes));
    CHECK(source_.Read(tensor, 0, std::as_writable_bytes(std::span(bytes))).ok());
    return bytes;
  }

  void Convert(const std::string& name) {
    const checkpoint::TensorInfo& weight = *source_.Find(name + ".weight");
    CHECK(weight.dtype == checkpoint::FileDType::kI8);
    const int64_t rows = weight.shape[0], cols = weight.shape[1] * 2;
    const auto codes = Bytes(weight), groups = Bytes(*source_.Find(name + ".scale"));
    const int64_t block_rows = (rows + kBlock - 1) / kBlock;
    const int64_t block_cols = (cols + kBlock - 1) / kBlock;
    std::vector<uint8_t> values(static_cast<size_t>(rows * cols));
    std::vector<uint8_t> scales(static_cast<size_t>(block_rows * block_cols));
    const auto group = [&](int64_t row, int64_t col) {
      return groups[static_cast<size_t>(row * (cols / kGroup) + col / kGroup)];
    };
    const auto block = [&](int64_t row, int64_t col) -> uint8_t& {
      return scales[static_cast<size_t>(row / kBlock * block_cols + col / kBlock)];
    };
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; col += kGroup) {
        block(row, col) = std::max(block(row, col), group(row, col));
      }
    }
    for (uint8_t& scale : scales) scale = static_cast<uint8_t>(scale - kHeadroom);
    for (int64_t i = 0; i < rows * cols; ++i) {
      const int shift = group(i / cols, i % cols) - block(i / cols, i % cols);
      CHECK_GE(shift, kLeast);
      const uint8_t two = codes[static_cast<size_t>(i / 2)];
      const uint8_t code = i % 2 == 0 ? two & 15 : two >> 4;
      values[static_cast<size_t>(i)] =
          FloatToFloat8(Float4ToFloat(code) * Ue8m0ToFloat(static_cast<uint8_t>(127 + shift)));
    }
    Add(name + ".weight", checkpoint::FileDType::kF8E4M3, {rows, cols}, std::move(values));
    Add(name + ".scale", checkpoint::FileDType::kF8E8M0, {block_rows, block_cols},
        std::move(scales));
  }
  void Add(const std::string& name, checkpoint::FileDType dtype, std::vector<int64_t> shape,
           std::vector<uint8_t> bytes) {
    tensors_.push_back({name, dtype, std::move(shape), static_cast<int64_t>(bytes.size())});
    made_[name] = std::move(bytes);
  }

  const checkpoint::TensorSource& source_;
  std::vector<checkpoint::TensorInfo> tensors_;
  std::map<std::string, std::vector<uint8_t>> made_;
};

}  // namespace fathom::model
