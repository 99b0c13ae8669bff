#include "api/background.h"

#include <exception>
#include <utility>

#include "base/log.h"

namespace fathom::api {

Background::Background(int num_threads, size_t max_waiting) : tasks_(max_waiting) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { RunThread(); });
}

Background::~Background() {
  stopping_ = true;
  tasks_.Close();
  for (std::thread& thread : threads_) thread.join();
}

bool Background::TryRun(std::function<void()> task) { return tasks_.TryPush(std::move(task)); }

void Background::RunThread() {
  while (auto task = tasks_.Pop()) {
    if (stopping_) continue;
    try {
      (*task)();
    } catch (const std::exception& e) {
      LogError("a long request failed: {}", e.what());
    }
  }
}

}  // namespace fathom::api
