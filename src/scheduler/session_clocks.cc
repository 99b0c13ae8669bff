#include "scheduler/session_clocks.h"

#include <algorithm>

#include "base/check.h"

namespace fathom::scheduler {
namespace {

// How far a live session may fall behind the server's time and still be owed it: else one that was
// nearly idle for an hour would own the device for the next.
constexpr double kMaxCreditSeconds = 1;

}  // namespace

std::shared_ptr<Session> SessionClocks::Join(const std::string& key) {
  std::shared_ptr<Session> session;
  if (key.empty()) {
    session = std::make_shared<Session>();
  } else {
    ForgetCaughtUp();
    std::shared_ptr<Session>& known = by_key_[key];
    if (known == nullptr) known = std::make_shared<Session>();
    session = known;
  }
  const double credit = session->num_live == 0 ? 0 : kMaxCreditSeconds;
  session->virtual_seconds = std::max(session->virtual_seconds, virtual_seconds_ - credit);
  if (session->num_live++ == 0) ++num_live_;
  return session;
}

void SessionClocks::Leave(Session& session) {
  CHECK_GT(session.num_live, 0);
  if (--session.num_live == 0) --num_live_;
}

void SessionClocks::Advance(double seconds) {
  virtual_seconds_ += seconds / std::max(1, num_live_);
}

// An idle session that the server's time has caught up with would start anew: it need not be kept.
// Looked for when the number has doubled, so that joining stays cheap.
void SessionClocks::ForgetCaughtUp() {
  if (by_key_.size() < forget_at_) return;
  std::erase_if(by_key_, [this](const auto& entry) {
    return entry.second->num_live == 0 && entry.second->virtual_seconds <= virtual_seconds_;
  });
  forget_at_ = std::max<size_t>(64, 2 * by_key_.size());
}

}  // namespace fathom::scheduler
