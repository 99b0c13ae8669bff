// What sm_90a kernels share, an instruction or two a function: mbarriers, bulk copies into shared
// memory, fences, cluster barriers, writes to a neighbour's shared memory, counters, words.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fathom::kernels {

__device__ inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The lanes of a warp before this one.
__device__ __forceinline__ uint32_t LanesBelow() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}
// As atomicAdd, by one lane or few: no instructions that add up lanes first.
__device__ __forceinline__ int AddShared(int* to, int value) {
  int before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(SharedAddress(to)), "r"(value)
               : "memory");
  return before;
}

__device__ inline void BarrierInit(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}
// Makes initialized barriers visible to the copy engine and the cluster.
__device__ inline void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void BarrierExpectBytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Waits until what the warp has begun to load is there, whether it has used it or not.
__device__ inline void FinishLoads() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
// One lane arrives for a warp, below a __syncwarp(). racecheck does not see that what other lanes
// did comes before such an arrival, so for it every lane arrives.
#ifdef FATHOM_RACECHECK
inline constexpr int kWarpArrivals = 32;
#else
inline constexpr int kWarpArrivals = 1;
#endif
// By a whole warp, for what its lanes have written and what they have read and used.
__device__ inline void WarpArrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kWarpArrivals) BarrierArrive(barrier);
}
// By a whole warp: what lies in shared memory may be overwritten. An arrival alone does not wait
// for loads that nothing has used yet: a copy that came to a free stage within a microsecond was
// seen to overtake them, where the warps of another kernel kept the multiprocessor's shared memory
// busy.
__device__ inline void WarpHandBack(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 >= kWarpArrivals) return;
  FinishLoads();
  BarrierArrive(barrier);
}
// The same where `any`, by a warp that has just waited for wgmma together, of what `a` and `b` were
// made of, without a branch or a fence, over which the compiler moves hardly anything: the
// arrival's count is made of them, so it comes when their loads were waited for. zero: 0, unknown
// to the compiler.
__device__ __forceinline__ void WarpHandBackBehind(uint64_t* barrier, bool any, float a, float b,
                                                   uint32_t zero) {
  const uint32_t count = 1 | ((__float_as_uint(a) | __float_as_uint(b)) & zero);
  const uint32_t arrives = any && threadIdx.x % 32 < kWarpArrivals;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n}" ::"r"(SharedAddress(barrier)),
      "r"(count), "r"(arrives)
      : "memory");
}
// Such a 0, in grids of one dimension.
__device__ __forceinline__ uint32_t UnknownZero() {
  uint32_t zero;
  asm("mov.u32 %0, %%ctaid.z;" : "=r"(zero));
  return zero;
}
__device__ inline void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Bytes that the current phase waits for besides arrivals.
__device__ inline void BarrierExpectMore(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// Arrives at this block's address `barrier` in the cluster's block `rank`; makes nothing visible.
__device__ inline void BarrierCountAt(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [r];\n}" ::"r"(
          SharedAddress(barrier)),
      "r"(rank)
      : "memory");
}
__device__ inline void BarrierWaitCluster(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// `bytes`, both addresses: multiples of 16. Completes on the barrier.
__device__ inline void BulkCopyTo(uint32_t shared, const void* global, uint32_t bytes,
                                  uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ inline void BulkCopy(void* shared, const void* global, uint32_t bytes,
                                uint64_t* barrier) {
  BulkCopyTo(SharedAddress(shared), global, bytes, barrier);
}

// Brings memory into the L2 cache; both multiples of 16.
__device__ inline void PrefetchBulk(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// What is read once a step: it leaves the L2 cache before what is read again.
__device__ inline uint64_t EvictFirst() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// BulkCopyTo with a policy for the L2 cache.
__device__ inline void BulkCopyTo(uint32_t shared, const void* global, uint32_t bytes,
                                  uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

// BulkCopy of what is read once a step.
__device__ inline void BulkCopyOnce(void* shared, const void* global, uint32_t bytes,
                                    uint64_t* barrier) {
  BulkCopyTo(SharedAddress(shared), global, bytes, barrier, EvictFirst());
}

__device__ inline void StoreShared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 LoadShared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
// Between this thread's stores to shared memory and wgmma's reads of it, a barrier apart.
__device__ inline void FenceSharedForWgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// By all warps of a warpgroup: a thread has kCount registers from here on, fewer or more.
template <int kCount>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
// Either, of a kernel that was given kGiven.
template <int kCount, int kGiven>
__device__ inline void SetRegisters() {
  if constexpr (kCount > kGiven) TakeRegisters<kCount>();
  if constexpr (kCount < kGiven) GiveRegisters<kCount>();
}

// Among `threads` threads of the block that name the same `id` (1..15).
__device__ inline void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts for who waits there, without waiting: what the warp has written they find.
__device__ inline void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// ClusterSync in two steps. The first makes nothing visible: it says that the block has started.
// racecheck lets nobody pass the second before all have come to it, and some warps come late: for
// it the first does both.
#ifdef FATHOM_RACECHECK
__device__ inline void ClusterArrive() { ClusterSync(); }
__device__ inline void ClusterPublish() { ClusterSync(); }
__device__ inline void ClusterWait() {}
#else
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// By all threads: with what each has written.
__device__ inline void ClusterPublish() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
// This block's address `p` as it is called in the shared memory of the cluster's block `rank`.
__device__ inline uint32_t AddressInBlock(const void* p, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(SharedAddress(p)), "r"(rank));
  return address;
}
// Both addresses in the same block (AddressInBlock). Counts as 4 bytes on the barrier, which says
// when the value is there: nothing waits for the store, as a barrier's release would. Of a launch
// of clusters only: elsewhere it is an illegal instruction, even within the block.
__device__ inline void SendInCluster(uint32_t address, float value, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address),
      "f"(value), "r"(barrier)
      : "memory");
}
__device__ inline void SendInCluster(uint32_t address, float2 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "f"(v.x), "f"(v.y), "r"(barrier)
      : "memory");
}
__device__ inline void SendInCluster(uint32_t address, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
// `value` to this block's address `p` in the cluster's block `rank`, on whose `barrier` it counts.
__device__ inline void SendToBlock(const float* p, float value, const uint64_t* barrier,
                                   uint32_t rank) {
  SendInCluster(AddressInBlock(p, rank), value, AddressInBlock(barrier, rank));
}
// Likewise sets bits there.
__device__ inline void OrInBlock(const uint32_t* p, uint32_t bits, const uint64_t* barrier,
                                 uint32_t rank) {
  asm volatile(
      "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.or.b32 "
      "[%0], %1, [%2];" ::"r"(AddressInBlock(p, rank)),
      "r"(bits), "r"(AddressInBlock(barrier, rank))
      : "memory");
}

// Counters in device memory by which blocks tell each other what is complete. What a thread wrote
// before it adds is visible to who then finds the sum; ReleaseAdd by one lane speaks for what its
// warp wrote before a __syncwarp().
__device__ inline void ReleaseAdd(int32_t* counter, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ inline int32_t AcquireLoad(const int32_t* counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Words in device memory by which blocks tell each other what fits into one: it is there or not,
// and speaks for nothing else.
__device__ __forceinline__ void StoreWord(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t LoadWord(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// A value and what says that it is there, in words next to each other (of four, two values), in
// memory that another block, or another GPU, writes or reads at the same time.
__device__ __forceinline__ void StoreTogether(void* to, uint32_t first, uint32_t second) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(first), "r"(second)
               : "memory");
}
__device__ __forceinline__ void StoreTogether(uint4* to, uint4 words) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ __forceinline__ uint2 LoadTogether(const uint2* from) {
  uint2 words;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(from)
               : "memory");
  return words;
}
__device__ __forceinline__ uint4 LoadTogether(const uint4* from) {
  uint4 words;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}

// 16 bytes from device into shared memory, zeros where there is nothing, or 4, without waiting.
__device__ __forceinline__ void CopyAhead(uint32_t to, const void* from, bool exists = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAhead4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// By a warp: what its lanes have begun to copy so is there, for all of them.
__device__ __forceinline__ void AwaitCopies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}
// The barrier's phase, which cannot end yet, waits for the thread's copies so far.
__device__ __forceinline__ void BarrierAwaitCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

}  // namespace fathom::kernels
