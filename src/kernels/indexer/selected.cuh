// Where a token's selection goes. Device code only.
#pragma once

#include <cstdint>

#include "kernels/numbered_words.cuh"

namespace fathom::kernels {

// As entries, or as numbered words.
struct Selected {
  int32_t* entries = nullptr;
  uint2* words = nullptr;
  uint32_t number = 0;

  __device__ void Store(int place, int entry) const {
    if (words != nullptr) {
      StoreNumbered(words + place, static_cast<uint32_t>(entry), number);
    } else {
      entries[place] = entry;
    }
  }
};

}  // namespace fathom::kernels
