// SessionClocks: how much of the device's time each session has had, for fair queueing between
// sessions. Seconds are of steps that were run, so a long context and a long answer count as what
// they cost. One thread (the engine's).
//
// Weighted fair queueing, all weights equal. The server's virtual time grows by a step's seconds
// divided by the number of live sessions: it is what each would have had under an equal split. A
// session's clock grows by what it really had; one that comes back starts at the server's time, so
// nobody saves up for a rush. A prompt's tag is its session's clock when it came plus its own cost;
// prompts run in order of max(tag, clock). So a short prompt passes a long one, a session with many
// prompts does not hold up one with few, and since the clocks go on, every tag is reached: nobody
// waits longer than under the equal split, and one prompt more.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

namespace fathom::scheduler {

struct Session {
  double virtual_seconds = 0;
  int num_live = 0;  // requests that wait or run
};

class SessionClocks {
 public:
  // The live session of this key, with one request more; a session of its own for an empty key.
  std::shared_ptr<Session> Join(const std::string& key);
  // One request less.
  void Leave(Session& session);

  // A step was run.
  void Advance(double seconds);

  int num_live() const { return num_live_; }
  double virtual_seconds() const { return virtual_seconds_; }
  size_t num_remembered() const { return by_key_.size(); }

 private:
  void ForgetCaughtUp();

  std::unordered_map<std::string, std::shared_ptr<Session>> by_key_;  // live, or still ahead
  int num_live_ = 0;  // sessions with a live request
  double virtual_seconds_ = 0;
  size_t forget_at_ = 64;
};

}  // namespace fathom::scheduler
