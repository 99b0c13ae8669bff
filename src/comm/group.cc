#include "comm/group.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fathom::comm {

Group::Group(Transport& transport, std::vector<int> members)
    : transport_(transport), members_(std::move(members)) {
  const auto own = std::find(members_.begin(), members_.end(), transport.rank());
  CHECK(own != members_.end());
  rank_ = static_cast<int>(own - members_.begin());
}

Status Group::AllGather(std::span<std::byte> all, std::span<const Range> ranges) {
  if (size() == 1) return OkStatus();
  CHECK_EQ(ranges.size(), members_.size());
  const auto part = [&](size_t m) {
    return all.subspan(static_cast<size_t>(ranges[m].begin),
                       static_cast<size_t>(ranges[m].end - ranges[m].begin));
  };
  std::vector<Outgoing> outgoing;
  std::vector<Incoming> incoming;
  for (size_t m = 0; m < members_.size(); ++m) {
    if (static_cast<int>(m) == rank_) continue;
    outgoing.push_back({members_[m], part(static_cast<size_t>(rank_))});
    incoming.push_back({members_[m], part(m)});
  }
  return transport_.Exchange(outgoing, incoming);
}

}  // namespace fathom::comm
