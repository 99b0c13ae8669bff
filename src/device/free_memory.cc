#include "device/free_memory.h"

#include <algorithm>
#include <thread>

namespace fathom::device {

int64_t AwaitFreeMemory(int64_t bytes, int64_t total, const std::function<int64_t()>& free_bytes,
                        const std::function<void(int64_t free)>& on_wait,
                        std::chrono::milliseconds patience) {
  constexpr std::chrono::milliseconds kBetweenLooks{50};
  int64_t free = free_bytes();
  if (free >= bytes || bytes > total) return free;
  on_wait(free);
  const auto end = std::chrono::steady_clock::now() + patience;
  while (free < bytes && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::min(kBetweenLooks, patience));
    free = free_bytes();
  }
  return free;
}

}  // namespace fathom::device
