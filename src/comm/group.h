// Group: the ranks that compute one thing together, and what they do together: each has a part of
// something, and all get the whole. One object a rank, used by its thread; every member calls the
// same operations in the same order. The transport outlives it. kPeer: as Transport::Exchange.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "comm/transport.h"

namespace fathom::comm {

class Group {
 public:
  // `members`: ranks of the transport, its own among them, in the same order at each of them.
  Group(Transport& transport, std::vector<int> members);

  int rank() const { return rank_; }  // its own place among the members
  int size() const { return static_cast<int>(members_.size()); }

  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };
  // all[ranges[m]] becomes member m's; its own range is there already. In bytes.
  Status AllGather(std::span<std::byte> all, std::span<const Range> ranges);

 private:
  Transport& transport_;
  std::vector<int> members_;
  int rank_ = 0;
};

}  // namespace fathom::comm
