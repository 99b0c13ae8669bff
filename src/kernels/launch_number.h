// A number that no other launch with words in the same place has for a long time, so that words of
// a launch's result can carry it (numbered_words.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fathom::kernels {

struct LaunchNumber {
  // Device memory, zero at first: counted by the rope angles' launch, a step's first.
  const uint32_t* of_step = nullptr;
  uint32_t index = 0;  // of the step's launches with words in the same place
  // Device memory: the number, as soon as the launch has waited and, where it makes the step's
  // index key, written that; null: nobody asks.
  uint32_t* begun = nullptr;
};

// Where a launch's words are, for who tells and who awaits them.
struct NumberedWords {
  uint2* words = nullptr;  // null: none
  LaunchNumber number = {};
};

}  // namespace fathom::kernels
