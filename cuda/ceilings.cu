// The two limits of sparse MLA on a GPU, measured with the instructions that the kernel may use: gathering the same rows without
// arithmetic, and mma.sync without memory. `overlay bench` compares the kernel with them in the same run.
#include "ptx.cuh"

// Gathers row_bytes of every index of a token, in a ring of `depth` rows a warp, four warps a block. Indices are read once, long
// before they are used: fetched one tile ahead they, and not the memory, would set the time (2234 instead of 1201 us measured).
// Grid: x = token, y = range of columns. Dynamic shared memory: indices, then 4 * depth rows.
extern "C" __global__ void __launch_bounds__(128)
    gather_rows(const u8* __restrict__ kv, u32 row_bytes, int rows, const int* __restrict__ indices, int columns,
                int columns_per_block, int depth, u32* sink) {
  extern __shared__ __align__(1024) u8 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.y * columns_per_block;
  const int count = min(columns_per_block, columns - first);
  int* list = reinterpret_cast<int*>(shared);
  u8* ring = shared + ((columns_per_block * 4 + 1023) & ~1023) + warp * depth * row_bytes;
  for (int i = threadIdx.x; i < count; i += 128) list[i] = __ldg(indices + static_cast<i64>(blockIdx.x) * columns + first + i);
  __syncthreads();
  int slot = 0;
  for (int i = warp; i < count; i += 4) {
    const int row = list[i];
    const bool live = static_cast<u32>(row) < static_cast<u32>(rows);
    const u8* source = kv + static_cast<u64>(live ? row : 0) * row_bytes;
    for (u32 byte = 16 * lane; byte < row_bytes; byte += 512) {
      copy16_async(shared_address(ring + slot * row_bytes + byte), source + byte, live);
    }
    commit_copies();
    // A row's slot is free when at most depth - 1 younger groups are in flight; the ring is a power of two of at least 8.
    if (depth == 8) wait_copies<7>();
    else wait_copies<15>();
    slot = slot + 1 == depth ? 0 : slot + 1;
  }
  wait_copies<0>();
  if (sink != nullptr) *sink = *reinterpret_cast<u32*>(ring);  // never taken: keeps the copies from being dead
}

// `rounds` times eight independent m16n8k16 products a warp. FLOP of a launch: warps * rounds * 8 * 4096.
extern "C" __global__ void __launch_bounds__(256) multiply_fragments(int rounds, float* sink) {
  const u32 a[4] = {0x3f803f80u + threadIdx.x, 0x3f813f80u, 0x3f823f80u, 0x3f833f80u};
  float c[8][4] = {};
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8; ++i) mma_bf16(c[i], a, 0x3f803f80u + i, 0x3f803f81u);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  if (sink != nullptr) *sink = sum;
}
