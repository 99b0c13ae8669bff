#include "comm/memory_transport.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "comm/rank_transport.h"

namespace fathom::comm {

std::vector<std::unique_ptr<Transport>> MakeMemoryTransports(int size, Duration timeout) {
  std::vector<std::string> names;
  for (int rank = 0; rank < size; ++rank) names.push_back(fmt::format("rank {}", rank));
  const auto world =
      RankWorld::Make(std::make_shared<GroupState>(), std::move(names), 0, size, timeout);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(std::make_unique<RankTransport>(world, rank, std::vector<Socket>()));
  }
  return transports;
}

}  // namespace fathom::comm
