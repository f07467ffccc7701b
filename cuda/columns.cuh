// Index columns: which of them name a row, which tiles are worth gathering, and indices fetched long before they are used.
#pragma once
#include "shape.cuh"

// Marks the columns of idx[0..columns) that name one of `rows` latent rows. Needs a block barrier before the bits are read.
template <class S>
__device__ __forceinline__ void scan_columns(Shared<S>& sm, const int* __restrict__ idx, int columns, int rows) {
  constexpr int kBatch = 9;  // loads in flight: 2176 columns are two rounds of four warps or one of eight
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = warp; first * 32 < columns; first += S::kWarps * kBatch) {
    int row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int column = (first + i * S::kWarps) * 32 + lane;
      row[i] = column < columns ? __ldg(idx + column) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int word = first + i * S::kWarps;
      const u32 bits = __ballot_sync(kFullWarp, static_cast<u32>(row[i]) < static_cast<u32>(rows));
      if (lane == 0 && word * 32 < columns) sm.live[word] = bits;
    }
  }
}

// Live rows of a tile, bit per row.
template <class S>
__device__ __forceinline__ u32 live_rows(const Shared<S>& sm, int tile) {
  if constexpr (S::kRows == 32) return sm.live[tile];
  return (sm.live[tile / 2] >> (16 * (tile % 2))) & 0xffffu;
}

// One warp lists the tiles that have a live row, in order. Skipping the others is what makes a short context cheap: vLLM's index
// rows are 2176 wide whatever the context.
template <class S>
__device__ __forceinline__ void list_live_tiles(Shared<S>& sm, int columns) {
  const int lane = threadIdx.x % 32;
  const int tiles = (columns + S::kRows - 1) / S::kRows;
  int count = 0;
  for (int base = 0; base < tiles; base += 32) {
    const int tile = base + lane;
    const bool live = tile < tiles && live_rows(sm, tile) != 0;
    const u32 votes = __ballot_sync(kFullWarp, live);
    if (live) sm.list[count + __popc(votes & ((1u << lane) - 1))] = static_cast<u16>(tile);
    count += __popc(votes);
  }
  if (lane == 0) sm.tiles_live = count;
}

// A column outside the row, in the last tile, must not pass for index 0.
constexpr int kNoRow = -1;

// Fetches the indices of 32 columns, one or two live tiles from number `position` on, into the ring. One warp does it; the copies
// travel with that warp's next group.
template <class S>
__device__ __forceinline__ void prefetch_indices(Shared<S>& sm, const int* __restrict__ idx, int columns, int position, int tiles) {
  const int lane = threadIdx.x % 32, row = lane % S::kRows;
  position += lane / S::kRows;
  if (position >= tiles) return;
  const int column = sm.list[position] * S::kRows + row;
  int* entry = &sm.ring[position % S::kRing][row];
  if (column < columns) {
    copy4_async(shared_address(entry), idx + column);
  } else {
    *entry = kNoRow;
  }
}

// The first indices, by the whole block. Plain loads: the scan has just brought these lines into L1.
template <class S>
__device__ __forceinline__ void fill_ring(Shared<S>& sm, const int* __restrict__ idx, int columns, int tiles) {
#pragma unroll
  for (int i = threadIdx.x; i < S::kRing * S::kRows; i += S::kThreads) {
    const int position = i / S::kRows, row = i % S::kRows;
    if (position >= tiles) break;
    const int column = sm.list[position] * S::kRows + row;
    sm.ring[position][row] = column < columns ? __ldg(idx + column) : kNoRow;
  }
}
