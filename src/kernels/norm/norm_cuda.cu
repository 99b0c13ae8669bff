// One block a row: each thread sums a stripe, the block adds the stripes by shuffles, then writes
// the row. Memory-bound: the row is read twice, the second time from L1 or L2.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/norm/norm_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 256;

__device__ float Load(float x) { return x; }
__device__ float Load(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void Store(float* out, float x) { *out = x; }
__device__ void Store(__nv_bfloat16* out, float x) { *out = __float2bfloat16_rn(x); }
template <typename T>
__device__ float RoundTo(float x) {
  T rounded;
  Store(&rounded, x);
  return Load(rounded);
}

// The sum over the block, on every thread.
__device__ float BlockSum(float x) {
  __shared__ float warp_sums[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += warp_sums[warp];
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const T* __restrict__ x, const __nv_bfloat16* __restrict__ weight, T* y,
                  int64_t size, int64_t x_stride, int64_t y_stride, float eps) {
  x += int64_t{blockIdx.x} * x_stride;
  y += int64_t{blockIdx.x} * y_stride;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) sum += Load(x[i]) * Load(x[i]);
  const float scale = 1.0f / sqrtf(BlockSum(sum) / static_cast<float>(size) + eps);
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    Store(y + i, Load(x[i]) * scale * Load(weight[i]));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) HeadNormKernel(T* q, int64_t size, float eps) {
  q += int64_t{blockIdx.x} * size;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) sum += RoundTo<T>(Load(q[i]) * Load(q[i]));
  const float mean = RoundTo<T>(BlockSum(sum) / static_cast<float>(size));
  const float scale = RoundTo<T>(1.0f / sqrtf(RoundTo<T>(mean + eps)));
  for (int64_t i = threadIdx.x; i < size; i += kThreads) Store(q + i, Load(q[i]) * scale);
}

template <typename T>
struct CudaType {
  using type = T;
};
template <>
struct CudaType<BFloat16> {
  using type = __nv_bfloat16;
};

void CheckLaunch() { CHECK_EQ(cudaGetLastError(), cudaSuccess); }

}  // namespace

template <typename T>
void LaunchCuda(const RmsNormParams<T>& p, device::Stream& stream) {
  using U = typename CudaType<T>::type;
  if (p.num_rows == 0) return;
  RmsNormKernel<U><<<static_cast<unsigned>(p.num_rows), kThreads, 0,
                     static_cast<cudaStream_t>(stream.native_handle())>>>(
      reinterpret_cast<const U*>(p.x), reinterpret_cast<const __nv_bfloat16*>(p.weight),
      reinterpret_cast<U*>(p.y), p.size, p.x_stride, p.y_stride, p.eps);
  CheckLaunch();
}

template <typename T>
void LaunchCuda(const HeadNormParams<T>& p, device::Stream& stream) {
  using U = typename CudaType<T>::type;
  if (p.num_rows == 0) return;
  HeadNormKernel<U><<<static_cast<unsigned>(p.num_rows), kThreads, 0,
                      static_cast<cudaStream_t>(stream.native_handle())>>>(
      reinterpret_cast<U*>(p.q), p.size, p.eps);
  CheckLaunch();
}

template void LaunchCuda(const RmsNormParams<BFloat16>&, device::Stream&);
template void LaunchCuda(const RmsNormParams<float>&, device::Stream&);
template void LaunchCuda(const HeadNormParams<BFloat16>&, device::Stream&);
template void LaunchCuda(const HeadNormParams<float>&, device::Stream&);

}  // namespace fathom::kernels
