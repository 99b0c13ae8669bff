// Several GPUs of one host: which there are, how they reach each other's memory, and how kernels
// are loaded when some wait for others. Any thread. In a build without CUDA there is no GPU.
#pragma once

#include <functional>
#include <span>
#include <string>

namespace fathom::device {

int CountGpus();

// Whether there is a driver that does not say that this process has no GPU: if none can be opened
// nevertheless, that is worth telling.
bool MayHaveGpus();

// How kernels on GPU `from` reach the memory of GPU `to`.
enum class PeerLink { kNone, kPcie, kNvlink };
PeerLink ProbePeerLink(int from, int to);

// Copies between these GPUs go from device to device where there is a link, and not through host
// memory. Before any work is enqueued.
void ReachEachOther(std::span<const int> gpus);

// One line, such as "GPUs 0-3: NVLink between all" or "GPUs 0-3: NVLink 0-1 2-3, no peer access
// 0-2 0-3 1-2 1-3". `probe`: ProbePeerLink.
std::string DescribeTopology(std::span<const int> gpus,
                             const std::function<PeerLink(int, int)>& probe);

// A kernel that is loaded when it is first launched may wait for the device, on which another one
// waits for the rank that is loading. So a process with several ranks loads all kernels when CUDA
// starts: to be called before anything else of CUDA, while there is one thread.
void LoadKernelsEagerly() noexcept;
bool KernelsAreLoadedEagerly();

}  // namespace fathom::device
