// MemoryTransport: ranks that are threads of one process. A message is copied once, by its
// receiver, out of the sender's memory. All ranks of a world are made together; the world lives as
// long as one of them does.
#pragma once

#include <memory>
#include <vector>

#include "base/clock.h"
#include "comm/transport.h"

namespace fathom::comm {

// One Transport a rank. An Exchange in which nothing moves for `timeout` ends the world.
std::vector<std::unique_ptr<Transport>> MakeMemoryTransports(int size, Duration timeout);

}  // namespace fathom::comm
