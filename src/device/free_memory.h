// Memory that another process gives back: the GPU memory of one that has ended is free a second or
// two later, all at once, and a server that is started again at once needs it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

namespace fathom::device {

inline constexpr std::chrono::milliseconds kFreeMemoryPatience{5000};

// Looks until `bytes` are free, or for `patience`; not at all for more than `total` bytes. Returns
// what is free then. `on_wait` is called before the first wait. Any thread; blocks it.
int64_t AwaitFreeMemory(int64_t bytes, int64_t total, const std::function<int64_t()>& free_bytes,
                        const std::function<void(int64_t free)>& on_wait,
                        std::chrono::milliseconds patience = kFreeMemoryPatience);

}  // namespace fathom::device
