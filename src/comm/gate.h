// Gate: lets in who knows the secret (secret_proof.h). The listening side takes many callers at
// once; each has 5 s and 80 bytes for it, and what is wrong with one is a line on the log and
// nothing else. The other side calls Enter. A connection that has passed is as it was made: nothing
// further was read from it. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "comm/socket.h"

namespace fathom::comm {

// What the caller says it is: {its node, 0} of a control connection, {its rank, the other's rank}
// of a data connection.
struct CallerIdentity {
  uint32_t from = 0;
  uint32_t to = 0;
};

struct Caller {
  Socket socket;
  CallerIdentity identity;
};

class Gate {
 public:
  Gate(const Socket& listener, std::string secret, std::string purpose);

  // The next caller that knows the secret; none at the deadline.
  std::optional<Caller> Next(TimePoint deadline);

 private:
  struct Pending {
    Socket socket;
    std::string address;
    std::string challenge;
    std::string answer;
    TimePoint deadline;
  };
  enum class Progress { kWaits, kPassed, kRefused };

  void Admit();
  void WaitForCallers(TimePoint deadline);
  std::optional<Caller> Advance();
  Progress Read(Pending& pending);
  Progress Judge(Pending& pending);
  void Complain(const Pending& pending, std::string_view what);

  const Socket& listener_;
  const std::string secret_;
  const std::string purpose_;
  std::vector<Pending> pending_;
  int num_complaints_ = 0;
};

// Connects to a gate and passes it. kUnavailable: nobody is there (yet); kPeer: it refused, does
// not know the secret itself, or is something else.
Result<Socket> Enter(const std::string& host, int port, std::string_view secret,
                     std::string_view purpose, CallerIdentity identity, TimePoint deadline);

}  // namespace fathom::comm
