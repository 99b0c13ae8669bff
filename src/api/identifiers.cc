#include "api/identifiers.h"

#include <fmt/format.h>

#include <atomic>
#include <random>

namespace fathom::api {
namespace {

uint64_t ProcessRandom() {
  static const uint64_t value = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }();
  return value;
}

// splitmix64: a bijection, so that distinct inputs stay distinct.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t NextCount() {
  static std::atomic<uint64_t> counter{0};
  return counter.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

std::string NewId(std::string_view prefix) {
  const uint64_t count = NextCount();
  return fmt::format("{}{:016x}{:016x}", prefix, Mix(ProcessRandom() ^ ~count),
                     Mix(ProcessRandom() + count));
}

std::string NewToolCallId() { return NewId("call_").substr(0, 5 + 24); }

uint64_t RandomSeed() { return Mix(ProcessRandom() + NextCount()); }

std::string SanitizeClientId(std::string_view id) {
  if (id.size() > 128) return "";
  for (const char c : id) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '.' || c == '_' || c == ':' || c == '-';
    if (!plain) return "";
  }
  return std::string(id);
}

}  // namespace fathom::api
