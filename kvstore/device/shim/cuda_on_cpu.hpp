// CUDA as kernels.cu uses it, on a CPU: every thread of a block is a fiber, blocks run one after another.
//
// A fiber runs until it waits for others (barrier, shuffle) or ends; a warp goes on until all of it waits for other
// warps, in rising order to one barrier and in falling order to the next. So what a GPU gets wrong now and then for want
// of a barrier is wrong here each time. Shared memory is NaN when a block begins. What a GPU would hang on or leave
// undefined is a Fault: barriers that not all threads reach, shuffles that not all named lanes reach, accesses that are
// not aligned.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
// Static __shared__ variables are left out on purpose: they couldn't be made NaN. Use KV_DYNAMIC_SHARED.
#define KV_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(kv_on_cpu::shared())

struct alignas(8) uint2 {
  unsigned int x, y;
};

struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};

struct dim3 {
  unsigned int x, y, z;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace kv_on_cpu {

constexpr unsigned int kLanes = 32;

struct Fault {
  std::string what;
};

// What a thread that runs asks of others. Implemented by driver.cpp.
void barrier(int line);
std::uint64_t exchange(std::uint32_t mask, std::uint64_t value, unsigned int from_lane, int line);
unsigned int lane();
void* shared();

template <typename T>
void check_aligned(const T* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0) {
    throw Fault{"an access of " + std::to_string(sizeof(T)) + " bytes at an address that is not aligned to that"};
  }
}

template <typename T>
T shuffle(std::uint32_t mask, T value, unsigned int from_lane, int line) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, from_lane, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace kv_on_cpu

#define __syncthreads() kv_on_cpu::barrier(__LINE__)
#define __shfl_sync(mask, value, from) kv_on_cpu::shuffle((mask), (value), (from), __LINE__)
#define __shfl_xor_sync(mask, value, by) kv_on_cpu::shuffle((mask), (value), kv_on_cpu::lane() ^ (by), __LINE__)

template <typename T>
T __ldcs(const T* address) {
  kv_on_cpu::check_aligned(address);
  return *address;
}

template <typename T>
void __stcs(T* address, T value) {
  kv_on_cpu::check_aligned(address);
  *address = value;
}

inline float __uint_as_float(unsigned int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned int __float_as_uint(float value) {
  unsigned int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Compiled with -ffp-contract=off, so that each is rounded by itself.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
