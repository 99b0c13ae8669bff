// For tests: a port of the loopback interface that nobody else gets while this process runs. It
// stays bound; only who asks for this one, and lets others share it as our listeners do, may listen
// at it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/check.h"

namespace fathom::comm {

inline int FreePort() {
  const int holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  CHECK(setsockopt(holder, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  CHECK(bind(holder, reinterpret_cast<sockaddr*>(&address), size) == 0);
  CHECK(getsockname(holder, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  return ntohs(address.sin_port);
}

}  // namespace fathom::comm
