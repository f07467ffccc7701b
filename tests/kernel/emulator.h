// CUDA on one CPU thread, for one block at a time: enough of it to run the kernel's own source without a GPU.
//
// Takes the place of cuda/ptx.cuh and of the compiler's built-ins. Every CUDA thread is a fiber that runs until it meets the
// others: at a barrier, or at an instruction of the whole warp, which is carried out when its 32 lanes have arrived. The order
// in which fibers run is a parameter, and so is the moment at which cp.async writes: at once or only when it is waited for.
// A kernel with too few barriers or waits gives another result in at least one of the combinations.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kFullWarp = 0xffffffffu;
constexpr u32 kSharedBytes = 101376;

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct dim3 { unsigned x = 0, y = 0, z = 0; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace emulator {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Copy {
  u32 shared;
  const void* global;
  int bytes;
  bool live;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  unsigned thread = 0;
  bool done = false;
  const u64* waits_for = nullptr;  // runnable again when this counter has left `seen`
  u64 seen = 0;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
};

// An instruction that the whole warp executes together: operands in, results out, one of each per lane.
struct Warp {
  const char* instruction = nullptr;
  int arrived = 0;
  u64 generation = 0;
  u32 in[32][12];
  u32 out[32][4];
};

struct Barrier {
  int arrived = 0;
  u64 generation = 0;
};

struct Range {
  const u8* first;
  i64 bytes;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  ucontext_t scheduler;
  Fiber* current = nullptr;
  std::function<void()> body;
  std::string failure;
  bool late = false;  // cp.async writes when it is waited for, not when it is issued
};

inline Block block;
inline dim3 block_index, grid_size;
inline std::vector<Range> readable;  // what copies may read, when not empty
inline i64 bank_conflicts = 0;       // of ldmatrix: phases of eight rows that share a bank
alignas(1024) inline u8 shared_memory[kSharedBytes];
// What shared memory holds before a block writes to it. All ones are NaN in bf16, fp16, fp32 and e4m3, and -1 as an index; a small
// number is a row that an index may name.
inline u32 poison = 0xffffffffu;

inline void fail(const std::string& what) { throw Failure(what + " (thread " + std::to_string(block.current->thread) + ")"); }

inline void yield_until(const u64& counter) {
  block.current->waits_for = &counter;
  block.current->seen = counter;
  swapcontext(&block.current->context, &block.scheduler);
}

inline void arrive(Barrier& barrier, int threads) {
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    yield_until(barrier.generation);
  }
}

// Deposits `operands`, waits for the other lanes, and returns this lane's results.
template <class Execute>
const u32* together(const char* instruction, std::initializer_list<u32> operands, Execute execute) {
  const unsigned thread = block.current->thread;
  Warp& warp = block.warps[thread / 32];
  if (warp.arrived == 0) warp.instruction = instruction;
  if (std::strcmp(warp.instruction, instruction) != 0) {
    fail(std::string("lanes of a warp meet at ") + warp.instruction + " and at " + instruction);
  }
  std::copy(operands.begin(), operands.end(), warp.in[thread % 32]);
  if (++warp.arrived == 32) {
    execute(warp);
    warp.arrived = 0;
    ++warp.generation;
  } else {
    yield_until(warp.generation);
  }
  return warp.out[thread % 32];
}

inline void perform(const Copy& copy) {
  if (copy.live) {
    std::memcpy(shared_memory + copy.shared, copy.global, copy.bytes);
  } else {
    std::memset(shared_memory + copy.shared, 0, copy.bytes);
  }
}

inline void issue(const Copy& copy) {
  if (copy.shared % copy.bytes || copy.shared + copy.bytes > kSharedBytes) fail("cp.async to a bad shared address");
  if (reinterpret_cast<uintptr_t>(copy.global) % copy.bytes) fail("cp.async from a misaligned address");
  const u8* source = static_cast<const u8*>(copy.global);
  const bool allowed = std::any_of(readable.begin(), readable.end(), [&](const Range& range) {
    return source >= range.first && source + copy.bytes <= range.first + range.bytes;
  });
  if (copy.live && copy.bytes == 16 && !readable.empty() && !allowed) fail("cp.async reads outside its tensors");
  if (!block.late) perform(copy);
  block.current->open.push_back(copy);
}

inline float from_half(u16 bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

inline u16 to_half(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  u16 bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

inline float as_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline u32 as_bits(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline u16 to_bf16(float value) {
  const u32 bits = as_bits(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(u16 bits) { return as_float(static_cast<u32>(bits) << 16); }

inline float from_e4m3(u8 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 128 ? -magnitude : magnitude;
}

inline void load_matrices(const char* name, u32 (&fragment)[4], u32 shared, bool transposed) {
  const u32* out = together(name, {shared}, [transposed](Warp& warp) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      u32 banks = 0;
      for (int row = 0; row < 8; ++row) {
        const u32 address = warp.in[8 * matrix + row][0];
        if (address % 16 || address + 16 > kSharedBytes) fail("ldmatrix from a bad shared address");
        banks |= 1u << (address / 16 % 8);
      }
      if (banks != 255) ++bank_conflicts;
      for (int lane = 0; lane < 32; ++lane) {
        u32 pair = 0;
        for (int half = 0; half < 2; ++half) {
          const int row = transposed ? 2 * (lane % 4) + half : lane / 4;
          const int column = transposed ? lane / 4 : 2 * (lane % 4) + half;
          u16 element;
          std::memcpy(&element, shared_memory + warp.in[8 * matrix + row][0] + 2 * column, 2);
          pair |= static_cast<u32>(element) << (16 * half);
        }
        warp.out[lane][matrix] = pair;
      }
    }
  });
  std::copy(out, out + 4, fragment);
}

inline void multiply(const char* name, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, float (*decode)(u16)) {
  const u32* out = together(
      name, {a[0], a[1], a[2], a[3], b0, b1, as_bits(c[0]), as_bits(c[1]), as_bits(c[2]), as_bits(c[3])}, [decode](Warp& warp) {
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; ++lane) {
          for (int half = 0; half < 2; ++half) {
            const int column = 2 * (lane % 4) + half;
            for (int i = 0; i < 4; ++i) {
              left[lane / 4 + 8 * (i % 2)][column + 8 * (i / 2)] = decode(static_cast<u16>(warp.in[lane][i] >> (16 * half)));
            }
            for (int i = 0; i < 2; ++i) right[column + 8 * i][lane / 4] = decode(static_cast<u16>(warp.in[lane][4 + i] >> (16 * half)));
          }
        }
        for (int lane = 0; lane < 32; ++lane) {
          for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            float sum = as_float(warp.in[lane][6 + i]);
            for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
            warp.out[lane][i] = as_bits(sum);
          }
        }
      });
  for (int i = 0; i < 4; ++i) c[i] = as_float(out[i]);
}

inline void enter() {
  try {
    block.body();
    for (const auto& group : block.current->groups) {
      if (!group.empty()) fail("a copy is still in flight when its thread ends");
    }
    if (!block.current->open.empty()) fail("a copy that no wait can reach");
  } catch (const Failure& failure) {
    if (block.failure.empty()) block.failure = failure.what();
  }
  block.current->done = true;
  swapcontext(&block.current->context, &block.scheduler);
}

// Runs one block; `order` lists its warps by priority: the first that can run does.
inline void run_block(int threads, const std::vector<int>& order, const std::function<void()>& body) {
  constexpr size_t kStack = 256 << 10;
  block.body = body;
  block.warps.assign(threads / 32, Warp{});
  std::fill(std::begin(block.barriers), std::end(block.barriers), Barrier{});
  while (block.fibers.size() < static_cast<size_t>(threads)) {
    block.fibers.push_back(std::make_unique<Fiber>());
    block.fibers.back()->stack.resize(kStack);
  }
  std::fill(reinterpret_cast<u32*>(shared_memory), reinterpret_cast<u32*>(shared_memory + kSharedBytes), poison);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = *block.fibers[i];
    fiber.thread = i;
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.open.clear();
    fiber.groups.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (int running = threads; running > 0;) {
    bool moved = false;
    for (size_t w = 0; w < order.size() && !moved; ++w) {
      for (int lane = 0; lane < 32; ++lane) {
        Fiber& fiber = *block.fibers[32 * order[w] + lane];
        if (fiber.done || (fiber.waits_for != nullptr && *fiber.waits_for == fiber.seen)) continue;
        fiber.waits_for = nullptr;
        block.current = &fiber;
        swapcontext(&block.scheduler, &fiber.context);
        running -= fiber.done;
        moved = true;
        if (!block.failure.empty()) return;
      }
    }
    if (!moved) {
      block.failure = "deadlock: every thread waits";
      return;
    }
  }
}

template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int grid_x, int grid_y, int grid_z, int threads, int reversed, int late, Arguments... arguments) {
  std::vector<int> order;
  for (int warp = 0; warp < threads / 32; ++warp) order.push_back(reversed ? threads / 32 - 1 - warp : warp);
  block.late = late;
  block.failure.clear();
  grid_size = {static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y), static_cast<unsigned>(grid_z)};
  for (unsigned z = 0; z < grid_size.z; ++z) {
    for (unsigned y = 0; y < grid_size.y; ++y) {
      for (unsigned x = 0; x < grid_size.x && block.failure.empty(); ++x) {
        block_index = {x, y, z};
        run_block(threads, order, [&] { kernel(arguments...); });
      }
    }
  }
  return block.failure.c_str();
}

}  // namespace emulator

// --- what the compiler provides ------------------------------------------------------------------------------------------------

#define threadIdx (dim3{emulator::block.current->thread, 0})
#define blockIdx (emulator::block_index)
#define gridDim (emulator::grid_size)
#define blockDim (dim3{static_cast<unsigned>(32 * emulator::block.warps.size()), 1})

template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}
template <class T>
T __ldcg(const T* pointer) {
  return *pointer;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline float __uint_as_float(u32 bits) { return emulator::as_float(bits); }
inline u32 __float_as_uint(float value) { return emulator::as_bits(value); }
inline float __int_as_float(int bits) { return emulator::as_float(static_cast<u32>(bits)); }

inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<u32>(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return result;
}

inline void __syncthreads() { emulator::arrive(emulator::block.barriers[0], static_cast<int>(32 * emulator::block.warps.size())); }
inline void __syncwarp() {
  emulator::together("syncwarp", {}, [](emulator::Warp&) {});
}

inline u32 __ballot_sync(u32, bool vote) {
  return *emulator::together("ballot", {vote}, [](emulator::Warp& warp) {
    u32 votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= warp.in[lane][0] << lane;
    for (int lane = 0; lane < 32; ++lane) warp.out[lane][0] = votes;
  });
}
inline bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

inline u32 __shfl_sync(u32, u32 value, int from) {
  return *emulator::together("shfl", {value, static_cast<u32>(from)}, [](emulator::Warp& warp) {
    for (u32 lane = 0; lane < 32; ++lane) warp.out[lane][0] = warp.in[warp.in[lane][1]][0];
  });
}
inline u32 __shfl_xor_sync(u32, u32 value, int lanes) {
  return *emulator::together("shfl", {value, static_cast<u32>(lanes)}, [](emulator::Warp& warp) {
    for (u32 lane = 0; lane < 32; ++lane) warp.out[lane][0] = warp.in[lane ^ warp.in[lane][1]][0];
  });
}
inline float __shfl_xor_sync(u32 mask, float value, int lanes) {
  return emulator::as_float(__shfl_xor_sync(mask, emulator::as_bits(value), lanes));
}

// --- cuda/ptx.cuh --------------------------------------------------------------------------------------------------------------

inline u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - emulator::shared_memory); }
inline void launch_dependents() {}
inline void wait_for_prerequisites() {}
inline void keep(u32&) {}
template <class T>
inline void keep(T*&) {}
inline void copy16_async(u32 shared, const void* global, bool live) { emulator::issue({shared, global, 16, live}); }
inline void copy4_async(u32 shared, const void* global) { emulator::issue({shared, global, 4, true}); }

inline void commit_copies() {
  emulator::Fiber& fiber = *emulator::block.current;
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

template <int Pending>
void wait_copies() {
  static_assert(Pending >= 0);
  auto& groups = emulator::block.current->groups;
  while (groups.size() > Pending) {
    if (emulator::block.late) std::for_each(groups.front().begin(), groups.front().end(), emulator::perform);
    groups.erase(groups.begin());
  }
}

template <int Threads>
void named_barrier(int number) {
  emulator::arrive(emulator::block.barriers[number], Threads);
}

template <int Threads>
void named_arrive(int number) {
  emulator::Barrier& barrier = emulator::block.barriers[number];
  if (++barrier.arrived == Threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}

inline void load_matrices(u32 (&fragment)[4], u32 shared) { emulator::load_matrices("ldmatrix", fragment, shared, false); }
inline void load_matrices_transposed(u32 (&fragment)[4], u32 shared) {
  emulator::load_matrices("ldmatrix.trans", fragment, shared, true);
}

inline u32 transpose_matrix(u32 fragment) {
  return *emulator::together("movmatrix", {fragment}, [](emulator::Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      u32 pair = 0;
      for (int half = 0; half < 2; ++half) {
        const int row = 2 * (lane % 4) + half, column = lane / 4;  // of the matrix before
        pair |= (warp.in[4 * row + column / 2][0] >> (16 * (column % 2)) & 0xffff) << (16 * half);
      }
      warp.out[lane][0] = pair;
    }
  });
}

inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::multiply("mma.bf16", c, a, b0, b1, emulator::from_bf16);
}
inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::multiply("mma.f16", c, a, b0, b1, emulator::from_half);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline u32 largest_of_warp(u32 number) {
  return *emulator::together("redux", {number}, [](emulator::Warp& warp) {
    u32 largest = 0;
    for (int lane = 0; lane < 32; ++lane) largest = std::max(largest, warp.in[lane][0]);
    for (int lane = 0; lane < 32; ++lane) warp.out[lane][0] = largest;
  });
}
inline u32 pack_bf16(float low, float high) { return emulator::to_bf16(low) | static_cast<u32>(emulator::to_bf16(high)) << 16; }
inline u32 pack_f16(float low, float high) { return emulator::to_half(low) | static_cast<u32>(emulator::to_half(high)) << 16; }
inline u32 larger_bf16(u32 one, u32 other) {
  const auto larger = [](u32 a, u32 b) { return std::isnan(emulator::from_bf16(a)) ? b : std::isnan(emulator::from_bf16(b)) ? a : std::max(a, b); };
  return larger(one & 0xffff, other & 0xffff) | larger(one >> 16, other >> 16) << 16;
}
inline float low_bf16(u32 pair) { return emulator::from_bf16(static_cast<u16>(pair)); }
inline float high_bf16(u32 pair) { return emulator::from_bf16(static_cast<u16>(pair >> 16)); }

inline float low_f16(u32 pair) { return emulator::from_half(static_cast<u16>(pair)); }
inline float high_f16(u32 pair) { return emulator::from_half(static_cast<u16>(pair >> 16)); }

inline void unpack_e4m3(u32 bytes, u32& low, u32& high) {
  u16 halves[4];
  for (int i = 0; i < 4; ++i) halves[i] = emulator::to_half(emulator::from_e4m3(static_cast<u8>(bytes >> (8 * i))));
  low = halves[0] | static_cast<u32>(halves[1]) << 16;
  high = halves[2] | static_cast<u32>(halves[3]) << 16;
}
