// Index columns: which of them name a row, which tiles are worth gathering, and indices fetched long before they are used.
#pragma once
#include "shape.cuh"

// Marks the columns of idx[0..columns) that name one of `rows` latent rows, and does something else while the first of them are on
// their way. Needs a block barrier before the bits are read.
template <class S, class Meanwhile>
__device__ __forceinline__ void scan_columns(Shared<S>& sm, const int* __restrict__ idx, int columns, int rows, Meanwhile meanwhile) {
  static_assert(kAheadColumns >= 32 * S::kWarps, "each warp has columns, and so comes to the meanwhile");
  constexpr int kBatch = 9;  // loads in flight: 2176 columns are two rounds of four warps
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = warp; first * 32 < columns; first += S::kWarps * kBatch) {
    int row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int column = (first + i * S::kWarps) * 32 + lane;
      row[i] = column < columns ? __ldg(idx + column) : -1;
    }
    if (first == warp) meanwhile();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int word = first + i * S::kWarps;
      const u32 bits = __ballot_sync(kFullWarp, static_cast<u32>(row[i]) < static_cast<u32>(rows));
      if (lane == 0 && word * 32 < columns) reinterpret_cast<u32*>(sm.live)[word] = bits;
    }
  }
}

// An index that names no row: of columns outside the index row, and of tiles after the last one. Also in memory, to copy from.
constexpr int kNoRow = -1;
__device__ const int no_row = kNoRow;
constexpr u16 kNoTile = 0xffff;  // its columns are beyond any index row

// One warp lists the tiles that have a live row, in order, with their live rows. Skipping the others is what makes a short context
// cheap: vLLM's index rows are 2176 wide whatever the context. The masks take the place of the bit map, from its start on: a tile
// never moves back.
template <class S>
__device__ __forceinline__ void list_live_tiles(Shared<S>& sm, int columns) {
  constexpr int kBatch = 5;  // reads side by side: 2176 columns are one round
  const int lane = threadIdx.x % 32;
  const int tiles = (columns + S::kRows - 1) / S::kRows;
  int count = 0;
  for (int base = 0; base < tiles; base += 32 * kBatch) {
    typename S::RowMask rows[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int tile = base + 32 * i + lane;
      rows[i] = tile < tiles ? sm.live[tile] : 0;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const u32 votes = __ballot_sync(kFullWarp, rows[i] != 0);
      if (rows[i] != 0) {
        const int position = count + __popc(votes & ((1u << lane) - 1));
        sm.list[position] = static_cast<u16>(base + 32 * i + lane);
        sm.live[position] = rows[i];
      }
      count += __popc(votes);
    }
    __syncwarp();
  }
  if (lane < S::kStreams) {  // an empty tile for the stream that has one less
    sm.live[count + lane] = 0;
    sm.list[count + lane] = kNoTile;
  }
  if (lane == 0) sm.tiles_live = count;
}

// Where the index of a row of a tile stands in the ring: those of one lane of a gather stand together.
template <class S>
__device__ __forceinline__ u32 ring_entry(u32 row) {
  return row % 4 * (S::kRows / 4) + row / 4;
}

// Fetches the indices of 32 columns, one or two of a stream's `tiles` tiles from number `position` on, into its ring. One warp does
// it; the copies travel with that warp's next group. Without a branch, and with all of its reads side by side: the other warps
// wait for this one at the next barrier. Past the last tile, and where few columns were scanned without a list, what it reads of the
// list is nothing, and `named` is false.
template <class S>
__device__ __forceinline__ void prefetch_indices(Shared<S>& sm, int stream, int position, int tiles) {
  const int lane = threadIdx.x % 32, row = lane % S::kRows;
  position += lane / S::kRows;
  const int tile = sm.list[min(position, tiles) * S::kStreams + stream];
  const int column = tile * S::kRows + row;
  const bool named = position < tiles && column < sm.columns;
  copy4_async(shared_address(&sm.ring[stream][position % S::kIndexTiles][ring_entry<S>(row)]), named ? sm.indices + column : &no_row);
}

// Up to `Columns` columns: live tiles, their rows and the ring in one step, without a word between the warps. Each sees all
// columns and knows every tile's place; each writes what stands in its words. Without a branch, since nothing else can start:
// tiles without a live row take the places behind the live ones, so that entries are written for all tiles. Needs a block barrier.
template <class S, int Columns = kAheadColumns, class Meanwhile>
__device__ __forceinline__ void scan_few_columns(Shared<S>& sm, const int* __restrict__ idx, int columns, int rows,
                                                 Meanwhile meanwhile) {
  constexpr u32 kWords = Columns / 32, kTiles = Columns / S::kRows;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int row[kWords];
#pragma unroll
  for (u32 i = 0; i < kWords; ++i) row[i] = 32 * i + lane < columns ? __ldg(idx + 32 * i + lane) : kNoRow;
  meanwhile();
  u32 bits = 0;  // of this lane's tile
#pragma unroll
  for (u32 i = 0; i < kWords; ++i) {
    const u32 word = __ballot_sync(kFullWarp, static_cast<u32>(row[i]) < static_cast<u32>(rows));
    if (lane * S::kRows / 32 == i) bits = word;
  }
  const auto live = static_cast<typename S::RowMask>(bits >> lane * S::kRows % 32);
  const u32 votes = __ballot_sync(kFullWarp, live != 0);
  const u32 count = __popc(votes);
  const auto place_of = [&](u32 tile) {
    const u32 before = __popc(votes & ((1u << tile) - 1));
    return votes >> tile & 1 ? before : count + tile - before;
  };
#pragma unroll
  for (u32 i = 0; i < kWords; ++i) {
    if (i % S::kWarps != warp) continue;
    const u32 place = place_of((32 * i + lane) / S::kRows);
    sm.ring[place % S::kStreams][place / S::kStreams][ring_entry<S>(lane % S::kRows)] = row[i];
  }
  if (warp != 0) return;
  if (lane < kTiles) sm.live[place_of(lane)] = live;
  if (lane == 0) sm.tiles_live = count;
}

// The first indices, by the whole block. Plain loads: the scan has just brought these lines into L1. A loop with 32 and 64 heads, for
// the sake of the one that follows: beside a straight line the compiler makes it 4 to 6 % slower.
template <class S>
__device__ __forceinline__ void fill_ring(Shared<S>& sm, const int* __restrict__ idx, int columns, int tiles) {
  if constexpr (S::kReplicated) {
    constexpr u32 kEntries = kAheadColumns / S::kThreads;  // of a thread
    int named[kEntries];
#pragma unroll
    for (u32 i = 0; i < kEntries; ++i) {
      const u32 entry = threadIdx.x + i * S::kThreads, position = entry / S::kRows;
      const int column = position < tiles ? sm.list[position] * S::kRows + entry % S::kRows : columns;
      named[i] = column < columns ? __ldg(idx + column) : kNoRow;
    }
#pragma unroll
    for (u32 i = 0; i < kEntries; ++i) {
      const u32 entry = threadIdx.x + i * S::kThreads, position = entry / S::kRows;
      sm.ring[position % S::kStreams][position / S::kStreams][ring_entry<S>(entry % S::kRows)] = named[i];
    }
  } else {
#pragma unroll
    for (int i = threadIdx.x; i < kAheadColumns; i += S::kThreads) {
      const int position = i / S::kRows, row = i % S::kRows;
      const int column = position < tiles ? sm.list[position] * S::kRows + row : columns;
      sm.ring[position % S::kStreams][position / S::kStreams][ring_entry<S>(row)] = column < columns ? __ldg(idx + column) : kNoRow;
    }
  }
}
