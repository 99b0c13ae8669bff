// Words of a launch's result that carry its number (launch_number.h) beside the value: who looks at
// one until it does waits neither for the launch's end nor for a flag behind the values. Numbers
// are odd: memory that was never written holds none. Packets have three values to a number, in a
// place of their own: where words are, a value could be taken for a number. A launch that has a
// number lets its successor start before it waits itself, and tells who asks (LaunchNumber::begun)
// when it has waited: then what is older than this launch is there. Device code only.
#pragma once

#include <cstdint>

#include "kernels/launch_number.h"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// May be read before a kernel's wait: the step's first launch has made it.
__device__ __forceinline__ uint32_t ValueOf(const LaunchNumber& number) {
  return *static_cast<const volatile uint32_t*>(number.of_step) + 2 * number.index + 1;
}

__device__ __forceinline__ void AwaitBegun(const LaunchNumber& number) {
  const uint32_t value = ValueOf(number);
  uint32_t seen;
  do {
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(seen) : "l"(number.begun) : "memory");
  } while (seen != value);
}

__device__ __forceinline__ void StoreNumbered(uint2* to, uint32_t value, uint32_t number) {
  StoreTogether(to, value, number);
}
// Two words next to each other, at a multiple of 16 bytes.
__device__ __forceinline__ void StoreTwoNumbered(uint2* to, uint2 values, uint32_t number) {
  StoreTogether(reinterpret_cast<uint4*>(to), uint4{values.x, number, values.y, number});
}

// Who sees a packet when it is there: the GPU whose memory it is in, or one that it was sent from,
// too.
struct OfGpu {
  static constexpr char kName[] = "gpu";
};
struct OfPeers {
  static constexpr char kName[] = "sys";
};

// Three values and the number, at a multiple of 16 bytes, which come as one.
template <typename Scope = OfGpu>
__device__ __forceinline__ void StoreNumberedPacket(uint4* to, uint3 values, uint32_t number) {
  asm volatile(
      "{\n.reg .b64 low, high;\n.reg .b128 packet;\n"
      "mov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\nmov.b128 packet, {low, high};\n"
      "st.relaxed.%5.global.b128 [%0], packet;\n}" ::"l"(to),
      "r"(values.x), "r"(values.y), "r"(values.z), "r"(number), "C"(Scope::kName)
      : "memory");
}
// w is the number when the others are there.
template <typename Scope = OfGpu>
__device__ __forceinline__ uint4 LoadNumberedPacket(const uint4* from) {
  uint4 packet;
  asm volatile(
      "{\n.reg .b64 low, high;\n.reg .b128 packet;\n"
      "ld.relaxed.%5.global.b128 packet, [%4];\nmov.b128 {low, high}, packet;\n"
      "mov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}"
      : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
      : "l"(from), "C"(Scope::kName)
      : "memory");
  return packet;
}

// What may not be there yet: y and w are numbers.
__device__ __forceinline__ uint4 LoadTwoNumbered(const uint2* from) {
  return LoadTogether(reinterpret_cast<const uint4*>(from));
}
__device__ __forceinline__ bool HaveNumber(uint4 two, uint32_t number) {
  return two.y == number && two.w == number;
}

// The values of an even number of words next to each other, a lane, on their way at once. All lanes
// of a warp look until all have theirs: what follows is one instruction stream.
template <int kWords>
__device__ __forceinline__ void AwaitNumbered(const uint2* from, uint32_t number,
                                              uint32_t (&values)[kWords]) {
  uint4 twos[kWords / 2];
  bool there;
  do {
    there = true;
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) twos[i] = LoadTwoNumbered(from + 2 * i);
#pragma unroll
    for (const uint4& two : twos) there = there && HaveNumber(two, number);
  } while (!__all_sync(0xffffffffu, there));
#pragma unroll
  for (int i = 0; i < kWords / 2; ++i) values[2 * i] = twos[i].x, values[2 * i + 1] = twos[i].z;
}

}  // namespace fathom::kernels
