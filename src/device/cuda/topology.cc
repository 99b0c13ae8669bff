#include <fmt/format.h>

#include <array>
#include <vector>

#include "device/cuda/multi_gpu.h"

namespace fathom::device {
namespace {

constexpr std::array kLinks = {PeerLink::kNvlink, PeerLink::kPcie, PeerLink::kNone};
const char* NameOf(PeerLink link) {
  switch (link) {
    case PeerLink::kNvlink:
      return "NVLink";
    case PeerLink::kPcie:
      return "PCIe peer access";
    case PeerLink::kNone:
      return "no peer access";
  }
  return "";
}

std::string ListOf(std::span<const int> gpus) {
  bool consecutive = true;
  std::string list;
  for (size_t i = 0; i < gpus.size(); ++i) {
    list += fmt::format("{}{}", i == 0 ? "" : ", ", gpus[i]);
    if (i > 0) consecutive = consecutive && gpus[i] == gpus[i - 1] + 1;
  }
  if (gpus.size() < 2) return "GPU " + list;
  return "GPUs " + (consecutive ? fmt::format("{}-{}", gpus.front(), gpus.back()) : list);
}

}  // namespace

std::string DescribeTopology(std::span<const int> gpus,
                             const std::function<PeerLink(int, int)>& probe) {
  if (gpus.size() < 2) return gpus.empty() ? "no GPU" : ListOf(gpus);
  std::array<std::string, kLinks.size()> pairs;
  size_t num_kinds = 0;
  for (size_t k = 0; k < kLinks.size(); ++k) {
    for (size_t i = 0; i < gpus.size(); ++i) {
      for (size_t j = i + 1; j < gpus.size(); ++j) {
        if (probe(gpus[i], gpus[j]) == kLinks[k]) {
          pairs[k] += fmt::format(" {}-{}", gpus[i], gpus[j]);
        }
      }
    }
    num_kinds += pairs[k].empty() ? 0 : 1;
  }
  std::string line = ListOf(gpus) + ":";
  const char* separator = " ";
  for (size_t k = 0; k < kLinks.size(); ++k) {
    if (pairs[k].empty()) continue;
    line +=
        separator + std::string(NameOf(kLinks[k])) + (num_kinds == 1 ? " between all" : pairs[k]);
    separator = ", ";
  }
  return line;
}

}  // namespace fathom::device
