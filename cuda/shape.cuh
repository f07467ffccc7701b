// What a block works on: the compile-time shape of a kernel variant and its map of shared memory.
//
// A latent row has 512 elements. Four slices of 128 elements each belong to one warp (to two warps when there are more than 32
// heads): a warp's slice of K for the scores is its slice of V, and of the output, for the values. So a warp gathers its own
// slice of every row and nobody else needs to see it; only the scores, partial sums over a slice, cross warps.
#pragma once
#include "ptx.cuh"

constexpr int kLatent = 512;
constexpr int kSlices = 4;
constexpr int kSliceDims = kLatent / kSlices;
constexpr int kMaxColumns = 8192;   // index columns a block can scan: the width of its bit map
constexpr int kAheadColumns = 256;  // columns held in the ring of prefetched indices

template <int Heads, bool Fp8, int Rows, int Slots>
struct Shape {
  static constexpr int kHeads = Heads;
  static constexpr bool kFp8 = Fp8;
  static constexpr int kRows = Rows;    // latent rows of a tile
  static constexpr int kSlots = Slots;  // tiles in shared memory

  static constexpr int kGroups = Heads > 32 ? 2 : 1;  // warps that share a slice, each with its own heads
  static constexpr int kGroupHeads = Heads / kGroups;
  static constexpr int kHeadTiles = kGroupHeads / 8;  // n8 tiles of the MMA
  static constexpr int kRowTiles = Rows / 16;         // m16 tiles of the scores, k16 tiles of the values
  static constexpr int kWarps = kSlices * kGroups;
  static constexpr int kThreads = 32 * kWarps;

  // Up to 16 heads every warp sums and exponentiates all scores itself: one barrier a tile. With 32 heads a group the sums
  // would cost more shared-memory traffic than the tile, so each warp finishes one n8 tile and hands the weights round.
  static constexpr bool kReplicated = kHeadTiles <= 2;
  // Two buffers of partial scores, used in turn, save the barrier between reading one tile's and writing the next; they are
  // affordable up to 4 KB each.
  static constexpr int kBuffers = kReplicated && kHeadTiles * kRowTiles <= 2 ? 2 : kGroups;

  static constexpr int kSliceBytes = kSliceDims * (Fp8 ? 1 : 2);
  static constexpr int kRowChunks = kSliceBytes / 16;
  static constexpr int kTileBytes = Rows * kSliceBytes;  // one slice of a tile
  static constexpr int kQueryBytes = Heads * kSliceDims * 2;
  static constexpr int kSliceRegion = kSlots * kTileBytes > kQueryBytes ? kSlots * kTileBytes : kQueryBytes;

  static constexpr int kRing = kAheadColumns / Rows;  // tiles in the index ring

  static_assert(Heads == 8 || Heads == 16 || Heads == 32 || Heads == 64, "heads of a block");
  static_assert(kReplicated || kHeadTiles == kSlices, "the warp of slice i finishes head tile i");
  static_assert(kSlots >= (kGroups == 1 ? 2 : 3), "tiles in flight");
  // An index is fetched kRing tiles ahead, has arrived kSlots tiles later, and is read kSlots tiles before its turn, ahead of that
  // tile's barrier.
  static_assert(kRing >= 2 * kSlots + (kGroups == 1), "indices must arrive before the gather that uses them");
};

template <class S>
struct Shared {
  // [slice][slot][row][chunk]; before the first tile it holds Q, after the last one the output: [slice][head][chunk].
  alignas(256) u8 tiles[kSlices][S::kSliceRegion];
  // Partial scores in fragment order, per group or in turn.
  float4 partial[S::kBuffers][kSlices][S::kRowTiles][S::kHeadTiles][32];
  // Weights in the order of the MMA's B operand, two head tiles together, and what the owner of a head tile decided.
  uint4 weights[S::kGroups][S::kRowTiles][(S::kHeadTiles + 1) / 2][32];
  float rescale[S::kHeads];
  float norm[S::kHeads];
  int grown[S::kGroups][4];
  int ring[S::kRing][S::kRows];  // indices of the coming tiles
  u32 live[kMaxColumns / 32];    // bit per column: its index names a row
  u16 list[kMaxColumns / 16];    // tiles with at least one such column
  u32 query_max[S::kFp8 ? kSlices : 1][S::kHeads];  // largest magnitude of Q, as the bits of a float
  int tiles_live;
};
