// From MMA fragments of the output, 16 dims by 8 heads, to rows of bf16 in global memory, a unit of 32 dims by 8 heads at a time.
// It goes through 512 bytes of shared memory: 16 bytes a dim, its 8 heads. The transposing form of ldmatrix takes rows from
// anywhere, so one of them hands each lane 8 dims in a row of one head, 16 bytes. Dims lie where neither writes nor reads conflict.
#pragma once
#include "gather.cuh"

constexpr int kUnitDims = 32;
constexpr int kUnitBytes = kUnitDims * 16;

__device__ __forceinline__ int place_of_dim(int dim) {
  const int eight = dim / 8;
  return 16 * (8 * eight + (dim % 8 ^ (2 * eight + eight % 2)));
}

// Two fragments of a unit: their upper and lower rows, each with heads 2j and 2j+1. e4m3 values were multiplied with neighbouring
// dims in a fragment's upper and lower half, so row c of a half is dim 2c or 2c+1, and not c or c+8.
template <bool PairedDims>
__device__ __forceinline__ void stage_unit(u8* stage, const u32 (&pairs)[2][2]) {
  const int lane = threadIdx.x % 32, c = lane / 4, j = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int dim = 16 * i + (PairedDims ? 2 * c + half : 8 * half + c);
      *reinterpret_cast<u32*>(stage + place_of_dim(dim) + 4 * j) = pairs[i][half];
    }
  }
}

// Dims 8j to 8j+7 of head c of a staged unit.
__device__ __forceinline__ uint4 unit_row(const u8* stage) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
  u32 dims[4];
  load_matrices_transposed(dims, shared_address(stage) + place_of_dim(row / 2 * 8 + 2 * matrix + row % 2));
  return make_uint4(dims[0], dims[1], dims[2], dims[3]);
}
