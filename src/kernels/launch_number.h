// A number that no other launch has for a long time, so that words of a launch's result can carry
// it (numbered_words.cuh).
#pragma once

#include <cstdint>

namespace fathom::kernels {

struct LaunchNumber {
  // Device memory, zero at first: counted by the rope angles' launch, a step's first.
  const uint32_t* of_step = nullptr;
  uint32_t index = 0;  // of the step's launches that have numbers
  // Device memory: the number, as soon as the launch has waited and, where it makes the step's
  // index key, written that.
  uint32_t* begun = nullptr;
};

}  // namespace fathom::kernels
