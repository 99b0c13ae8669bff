// Hands out aligned pieces of one buffer; without a base it only counts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fathom::model {

template <int64_t kAlignment>
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename U>
  void Take(U*& pointer, int64_t count) {
    if (base_ != nullptr) pointer = reinterpret_cast<U*>(base_ + bytes_);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(U));
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  int64_t bytes_ = 0;
};

}  // namespace fathom::model
