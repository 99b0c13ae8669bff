// EvictionQueue: items in the order in which they are given up, so that one session's items can be
// spared. An item is in a group (its session, or the group of what sessions share) and has a key;
// the smallest key goes first. Operations are logarithmic. A value; one thread.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"

namespace fathom::kv_cache {

struct EvictionKey {
  uint64_t time = 0;  // of the last use, with credit for sharing
  int64_t order = 0;  // among what was used at once: minus the number of tokens, so that the end of
                      // a prefix goes before its beginning
  uint64_t serial = 0;  // of creation: makes keys unique
  auto operator<=>(const EvictionKey&) const = default;
};

// Where an item stands in one queue; kept with the item.
struct EvictionPlace {
  bool queued = false;
  uint64_t group = 0;
  EvictionKey key;
};

template <typename T>
class EvictionQueue {
 public:
  // Inserts the item, or moves it.
  void Put(T& item, EvictionPlace& place, uint64_t group, const EvictionKey& key) {
    Remove(place);
    place = {true, group, key};
    std::map<EvictionKey, T*>& items = groups_[group];
    if (!items.empty()) heads_.erase({items.begin()->first, group});
    CHECK(items.emplace(key, &item).second);
    heads_.insert({items.begin()->first, group});
    ++size_;
  }

  void Remove(EvictionPlace& place) {
    if (!place.queued) return;
    const auto group = groups_.find(place.group);
    heads_.erase({group->second.begin()->first, place.group});
    group->second.erase(place.key);
    if (group->second.empty()) {
      groups_.erase(group);
    } else {
      heads_.insert({group->second.begin()->first, place.group});
    }
    place.queued = false;
    --size_;
  }

  // The first item outside the group `spared`. A group that has more than half of all is not
  // spared: nobody pushes out everybody else. Null when empty.
  T* First(uint64_t spared) const {
    const auto own = groups_.find(spared);
    const bool spare = own != groups_.end() && own->second.size() * 2 <= size_;
    for (const auto& [key, group] : heads_) {
      if (group != spared || !spare) return groups_.at(group).begin()->second;
    }
    return nullptr;
  }

  size_t size() const { return size_; }

 private:
  std::map<uint64_t, std::map<EvictionKey, T*>> groups_;
  std::set<std::pair<EvictionKey, uint64_t>> heads_;  // the first of each group
  size_t size_ = 0;
};

}  // namespace fathom::kv_cache
