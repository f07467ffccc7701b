// PTX wrappers: every instruction this kernel needs that C++ has no name for. Nothing here knows about attention.
//
// Baseline of the family (sm_80 to sm_121): mma.sync m16n8k16, ldmatrix, movmatrix, cp.async, redux.sync, max.bf16x2. The one
// instruction that depends on the architecture is the e4m3 conversion (sm_89 and later), for which older parts get bit arithmetic.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kFullWarp = 0xffffffffu;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Keeps a value in its register: left alone, the compiler computes addresses anew from the thread's number at every use, which
// took a third of the instructions of a tile.
__device__ __forceinline__ void keep(u32& value) { asm volatile("" : "+r"(value)); }
template <class T>
__device__ __forceinline__ void keep(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// --- asynchronous copies -----------------------------------------------------------------------------------------------------

// 16 bytes from global to shared memory past L1. With `live` false the source is not read and the destination becomes zeros.
__device__ __forceinline__ void copy16_async(u32 shared, const void* global, bool live) {
  const int bytes = live ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy4_async(u32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's most recent groups are still in flight.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  static_assert(Pending >= 0, "a negative constant assembles without a word and waits for nothing");
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// --- dependent launches ------------------------------------------------------------------------------------------------------

// Lets the kernel behind this one in the stream start, if it was launched to start early: its blocks take their places while
// this grid still runs. Nothing is promised about memory.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before this one has ended and what it wrote can be read. Without an early start there is nothing to
// wait for.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- barriers ----------------------------------------------------------------------------------------------------------------

// Named barrier over `Threads` threads of the block; number 0 belongs to __syncthreads().
template <int Threads>
__device__ __forceinline__ void named_barrier(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(Threads) : "memory");
}

// Arrives there without waiting: `Threads` counts those that arrive and those that wait.
template <int Threads>
__device__ __forceinline__ void named_arrive(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(Threads) : "memory");
}

// --- matrix fragments --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(u32 (&fragment)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&fragment)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}

// Transposes one 8 x 8 matrix of 16-bit elements held across the warp.
__device__ __forceinline__ u32 transpose_matrix(u32 fragment) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- numbers -----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to the last bit but one, without the branches of a division.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The largest of a warp's numbers.
__device__ __forceinline__ u32 largest_of_warp(u32 number) {
  u32 largest;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(number));
  return largest;
}

// Two floats to a pair of 16-bit numbers, `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The larger ones of two pairs of bf16 without a sign.
__device__ __forceinline__ u32 larger_bf16(u32 one, u32 other) {
  u32 larger;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(one), "r"(other));
  return larger;
}

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float low_f16(u32 pair) {
  float number;
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tcvt.f32.f16 %0, l;\n\t}" : "=f"(number) : "r"(pair));
  return number;
}

__device__ __forceinline__ float high_f16(u32 pair) {
  float number;
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tcvt.f32.f16 %0, h;\n\t}" : "=f"(number) : "r"(pair));
  return number;
}

// Four e4m3 bytes to four f16, exact: the two low bytes go to `low`, the two high bytes to `high`.
__device__ __forceinline__ void unpack_e4m3(u32 bytes, u32& low, u32& high) {
#if __CUDA_ARCH__ >= 890
  // Splitting with mov.b32 costs nothing; a shift and a truncation cost 64 shifts a tile on sm_90.
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, l;\n\tcvt.rn.f16x2.e4m3x2 %1, h;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
#else
  // e4m3 shifted into f16's fields is the value times 2^-8 (bias 7 against 15), subnormals included. The two NaN codes become
  // 480 here: the cache writer saturates and never stores them.
  const u32 spread_low = __byte_perm(bytes, 0, 0x4140), spread_high = __byte_perm(bytes, 0, 0x4342);
  const u32 bits_low = ((spread_low & 0x00800080u) << 8) | ((spread_low & 0x007f007fu) << 7);
  const u32 bits_high = ((spread_high & 0x00800080u) << 8) | ((spread_high & 0x007f007fu) << 7);
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(bits_low), "r"(0x5c005c00u));
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(bits_high), "r"(0x5c005c00u));
#endif
}
