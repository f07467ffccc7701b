// Movement between global and shared memory, always in chunks of 16 bytes. Chunk c of row r lies at c ^ (r & 7): conflict-free
// for the copies that write rows, for ldmatrix that reads eight rows of one chunk, and for its transposing form.
#pragma once
#include "columns.cuh"

__device__ __forceinline__ u32 swizzled(int row, int chunk, int row_bytes) {
  return static_cast<u32>(row * row_bytes + ((chunk ^ (row & 7)) << 4));
}

// What a lane copies of one tile: one chunk of each of its rows.
template <class S>
struct TileRows {
  static constexpr int kLanesPerRow = S::kRowChunks;
  static constexpr int kCount = S::kRows / S::kGroups / (32 / kLanesPerRow);
  int row[kCount];

  __device__ __forceinline__ static int chunk() { return threadIdx.x % 32 % kLanesPerRow; }
  __device__ __forceinline__ static int first(int group) {
    return group * (S::kRows / S::kGroups) + threadIdx.x % 32 / kLanesPerRow * kCount;
  }

  // From the ring, apart from the copies: the compiler may not move a load over a copy, and eight times the latency of shared
  // memory one after the other cost more than the products.
  __device__ __forceinline__ void read(const Shared<S>& sm, int group, int position) {
    const int2* indices = reinterpret_cast<const int2*>(&sm.ring[position % S::kRing][first(group)]);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const int2 pair = indices[i];
      row[2 * i] = pair.x;
      row[2 * i + 1] = pair.y;
    }
  }
};

// The latent rows as one lane sees them.
struct Source {
  const u8* base;  // this lane's chunk of row 0
  u32 stride;
  u32 rows;
};

// This warp's share of a tile: its slice of the rows, or half of the rows when two warps share the slice. Rows without a valid
// index become zeros and are never read. Always commits a group, so that the count of groups says which tile has arrived.
template <class S>
__device__ __forceinline__ void gather_tile(Shared<S>& sm, const Source& source, int slice, int group, int position, int tiles,
                                            const TileRows<S>& rows) {
  if (position < tiles) {
    const int first = TileRows<S>::first(group), chunk = TileRows<S>::chunk();
    const u32 slot = shared_address(&sm.tiles[slice][position % S::kSlots * S::kTileBytes]);
#pragma unroll
    for (int i = 0; i < TileRows<S>::kCount; ++i) {
      const u32 row = rows.row[i];
      copy16_async(slot + swizzled(first + i, chunk, S::kSliceBytes), source.base + static_cast<u64>(row) * source.stride,
                   row < source.rows);
    }
  }
  commit_copies();
}

// Where the warp stages rows of 128 bf16 elements, one per head of its group: queries before, outputs after the tiles.
template <class S>
__device__ __forceinline__ u8* staging(Shared<S>& sm, int slice, int group) {
  return &sm.tiles[slice][group * S::kGroupHeads * kSliceDims * 2];
}

// Q of the warp's heads and slice into its staging area; heads beyond `heads` become zeros. Strides in bytes.
template <class S>
__device__ __forceinline__ void stage_query(u8* stage, const u8* __restrict__ q, i64 head_stride, int heads) {
  const int lane = threadIdx.x % 32, chunk = lane % 16;
#pragma unroll
  for (int head = lane / 16; head < S::kGroupHeads; head += 2) {
    const bool on = head < heads;
    copy16_async(shared_address(stage) + swizzled(head, chunk, 256), q + (on ? head * head_stride : 0) + 16 * chunk, on);
  }
  commit_copies();
}

template <class S>
__device__ __forceinline__ void store_output(const u8* stage, u8* __restrict__ out, i64 head_stride, int heads) {
  const int lane = threadIdx.x % 32, chunk = lane % 16;
#pragma unroll
  for (int head = lane / 16; head < S::kGroupHeads; head += 2) {
    const uint4 data = *reinterpret_cast<const uint4*>(stage + swizzled(head, chunk, 256));
    if (head < heads) *reinterpret_cast<uint4*>(out + head * head_stride + 16 * chunk) = data;
  }
}
