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
      if (lane == 0 && word * 32 < columns) reinterpret_cast<u32*>(sm.live)[word] = bits;
    }
  }
}

// One warp lists the tiles that have a live row, in order, with their live rows. Skipping the others is what makes a short context
// cheap: vLLM's index rows are 2176 wide whatever the context. The masks take the place of the bit map, from its start on: a tile
// never moves back.
template <class S>
__device__ __forceinline__ void list_live_tiles(Shared<S>& sm, int columns) {
  const int lane = threadIdx.x % 32;
  const int tiles = (columns + S::kRows - 1) / S::kRows;
  int count = 0;
  for (int base = 0; base < tiles; base += 32) {
    const int tile = base + lane;
    const auto rows = tile < tiles ? sm.live[tile] : 0;
    const u32 votes = __ballot_sync(kFullWarp, rows != 0);
    if (rows != 0) {
      const int position = count + __popc(votes & ((1u << lane) - 1));
      sm.list[position] = static_cast<u16>(tile);
      sm.live[position] = rows;
    }
    count += __popc(votes);
    __syncwarp();
  }
  if (lane < S::kStreams) sm.live[count + lane] = 0;  // an empty tile for the stream that has one less
  if (lane == 0) sm.tiles_live = count;
}

// An index that names no row: of columns outside the index row, and of tiles after the last one.
constexpr int kNoRow = -1;

// Where the index of a row of a tile stands in the ring: those of one lane of a gather stand together.
template <class S>
__device__ __forceinline__ int ring_entry(int row) {
  constexpr int kGroupRows = S::kRows / S::kGroups;
  return row / kGroupRows * kGroupRows + row % 4 * (kGroupRows / 4) + row % kGroupRows / 4;
}

// Fetches the indices of 32 columns, one or two of a stream's tiles from number `position` on, into its ring. One warp does it;
// the copies travel with that warp's next group.
template <class S>
__device__ __forceinline__ void prefetch_indices(Shared<S>& sm, int stream, int position) {
  const int lane = threadIdx.x % 32, row = lane % S::kRows;
  position += lane / S::kRows;
  int* entry = &sm.ring[stream][position % S::kIndexTiles][ring_entry<S>(row)];
  const int columns = sm.columns, listed = position * S::kStreams + stream;
  const int column = listed < sm.tiles_live ? sm.list[listed] * S::kRows + row : columns;
  if (column < columns) {
    copy4_async(shared_address(entry), sm.indices + column);
  } else {
    *entry = kNoRow;
  }
}

// The first indices, by the whole block. Plain loads: the scan has just brought these lines into L1.
template <class S>
__device__ __forceinline__ void fill_ring(Shared<S>& sm, const int* __restrict__ idx, int columns, int tiles) {
#pragma unroll
  for (int i = threadIdx.x; i < kAheadColumns; i += S::kThreads) {
    const int position = i / S::kRows, row = i % S::kRows;
    const int column = position < tiles ? sm.list[position] * S::kRows + row : columns;
    sm.ring[position % S::kStreams][position / S::kStreams][ring_entry<S>(row)] = column < columns ? __ldg(idx + column) : kNoRow;
  }
}
