// How a boundary leaves its Milestone: by one thread, long before the launch ends, which waits for
// the word's way to the host. Device code only.
#pragma once

#include "kernels/hyper_connection/hyper_connection_cuda.h"

namespace fathom::kernels {

__device__ __forceinline__ void Leave(const Milestone& milestone) {
  if (milestone.word == nullptr) return;
  *static_cast<volatile uint32_t*>(milestone.word) = milestone.value;
}

}  // namespace fathom::kernels
