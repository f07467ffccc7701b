// What a block works on: the compile-time shape of a kernel variant and its map of shared memory.
//
// A latent row has 512 elements, cut into slices of one warp each: a warp's slice of K for the scores is its slice of V, and of
// the output, for the values. So a warp gathers its own slice of every row and nobody else needs to see it; only the scores,
// partial sums over a slice, cross warps.
//
// Up to 16 heads two slices are enough for the registers, and a block is two pairs of warps, two streams that share nothing until
// the end: each takes every other tile. With 32 heads there are four slices and one stream. With 64, two groups of warps, each with
// its 32 heads, share the tiles: a slice is gathered by the second group and read by both. More heads take several blocks. A head
// block is the heads of one group. For few tokens, 8 and 16 heads have four slices and one stream as well (few_tokens.cuh).
//
// A slice of a tile is cut once more, into pieces of 128 bytes a row. A piece is refilled as soon as its values have been read,
// so that a block needs little more shared memory than the tile it works on. Two groups hold two tiles and refill whole ones; for few
// tokens a tile is refilled behind its products.
#pragma once
#include "ptx.cuh"

constexpr int kLatent = 512;
constexpr int kMaxColumns = 8192;   // index columns a block can scan: the width of its bit map
constexpr int kAheadColumns = 256;  // columns held in the rings of prefetched indices
constexpr int kPieceRowBytes = 128;
// What a warp writes in the end, whatever its slice was: 128 dims of its heads.
constexpr int kQuarters = 4;
constexpr int kQuarterDims = kLatent / kQuarters;
constexpr int kQuarterTiles = kQuarterDims / 16;

template <bool First, class A, class B>
struct Select {
  using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using Type = B;
};

template <int Heads, bool Fp8, int Rows, int Ring, int Groups, int Streams>
struct Shape {
  static constexpr int kHeads = Heads;    // of a group of warps
  static constexpr int kGroups = Groups;  // that work on the same tiles
  static constexpr bool kShared = Groups > 1;
  static constexpr bool kFp8 = Fp8;
  static constexpr int kRows = Rows;  // latent rows of a tile
  static constexpr int kRing = Ring;  // pieces of a slice in shared memory
  using RowMask = typename Select<Rows == 32, u32, u16>::Type;

  static constexpr bool kReplicated = Heads <= 16;    // every warp of a stream finishes all scores; else each its head tile
  static constexpr int kStreams = Streams;
  static constexpr int kSlices = 4 / kStreams;
  static constexpr bool kFew = kReplicated && kStreams == 1;  // for few tokens
  static constexpr int kGroupWarps = kSlices * kStreams;
  static constexpr int kWarps = kGroups * kGroupWarps;
  static constexpr int kThreads = 32 * kWarps;

  static constexpr int kHeadTiles = Heads / 8;    // n8 tiles of the MMA
  static constexpr int kRowTiles = Rows / 16;     // m16 tiles of the scores, k16 tiles of the values

  static constexpr int kSliceDims = kLatent / kSlices;
  static constexpr int kDimTiles = kSliceDims / 16;  // k16 steps of the scores, m16 tiles of the values
  static constexpr int kPieces = kSliceDims * (Fp8 ? 1 : 2) / kPieceRowBytes;
  static constexpr int kPieceTiles = kDimTiles / kPieces;
  static constexpr int kPieceBytes = Rows * kPieceRowBytes;
  static constexpr int kQueryBytes = Heads * kSliceDims * 2;
  static constexpr int kSliceQueries = kGroups * kQueryBytes;
  // Room for Q before the first tile. For few tokens Q lies within the ring.
  static constexpr int kSliceRegion = kFew || kRing * kPieceBytes > kSliceQueries ? kRing * kPieceBytes : kSliceQueries;

  // Registers allow to hold the values of a whole tile: its pieces are refilled before the softmax, not after it. For few tokens it is
  // faster after.
  static constexpr bool kEarlyValues = Heads == 8 && !kFew && kRowTiles * kDimTiles * (Fp8 ? 2 : 4) <= 64;
  // Dims whose values are loaded at once: as many as the registers allow beside the ones in use.
  static constexpr bool kWholePieces = kEarlyValues || kFew || (Heads == 32 && !Fp8 && !kShared);
  static constexpr int kStepTiles = kWholePieces ? kPieceTiles : kPieceTiles / (Heads > 8 && Fp8 ? 4 : 2);
  // Whether a lane's addresses are kept, of K, and of V and the targets of copies; and whether a tile's mask is read after its scores
  // instead of before them. From one choice to another, and with what stands before and after it, the same loop takes 1 to 9 % more
  // or less (docs/kernel.md, what was tried): before it is changed, every variant wants to be timed.
  static constexpr bool kKeepsKeys = Heads == 8 || kShared || (Heads == 16 && Fp8 && !kFew);
  static constexpr bool kKeepsTargets = Heads == 8;
  static constexpr bool kLateMask = !kReplicated && (kShared || Fp8);
  // Whether the compiler is told that a warp's number is the same in all its lanes. Addresses then take uniform registers: 1 to
  // 2 % faster; with 32 heads in fp8 its schedule is 4 to 5 % slower.
  static constexpr bool kUniformWarp = Heads <= 16 || !Fp8;
  // Whether neighbouring dims go through the head tiles there and back, in the second product: with two groups 0.4 % faster at 128
  // tokens.
  static constexpr bool kThereAndBack = kShared || (Heads == 16 && Fp8 && !kFew);
  // Two buffers of partial scores, used in turn, save the barrier between reading one tile's and writing the next: 4 % with 16 heads
  // in fp8, at 1,024 tokens. Two blocks of 16 heads in bf16 have no room for them; a single one (`deep`) would, not tried.
  static constexpr int kBuffers = Heads == 8 || kFew || (kReplicated && Fp8) ? 2 : 1;
  static constexpr int kPartialTiles = kReplicated ? kHeadTiles : kHeadTiles - 1;  // head tiles that a warp shows to others

  // Whether Q goes to f16 while the first rows are on their way, and not before. 32 heads spill.
  static constexpr bool kLateQuery = Fp8 && kReplicated && !kFew;
  static constexpr int kIndexTiles = kAheadColumns / (kStreams * Rows);  // tiles in the index ring of a stream
  static constexpr int kTilesAhead = (kRing + kPieces - 1) / kPieces;

  static_assert(Heads == 8 || Heads == 16 || Heads == 32, "heads of a block");
  static_assert(kReplicated || kStreams == 1, "scores are dealt within a stream");
  static_assert(kReplicated || kHeadTiles == kSlices, "the warp of slice i finishes head tile i");
  static_assert(kRing >= kPieces, "a whole tile");
  static_assert(!kShared || (Groups == 2 && !kReplicated && !Fp8 && kRing == 2 * kPieces), "two groups take turns on two tiles");
  // An index is fetched kIndexTiles ahead, has arrived kTilesAhead tiles later, and is read as long before its turn: in a tile
  // ahead of its barrier at the earliest.
  static_assert(kIndexTiles > 2 * kTilesAhead, "indices must arrive before the gather that uses them");
};

template <class S>
struct Shared {
  // [slice of a stream][ring][row][chunk]; before the first tile it holds Q, after the last one outputs.
  alignas(256) u8 tiles[S::kStreams * S::kSlices][S::kSliceRegion];
  // Partial scores in fragment order. Replicated: [0][buffer][stream][slice][...]; else [group][0][0][owner of the head tile][...].
  float4 partial[S::kGroups][S::kBuffers][S::kStreams][S::kSlices][S::kRowTiles][S::kPartialTiles][32];
  // What the owner of a head tile decided: weights, matrices of 8 rows by 8 heads for ldmatrix, and whether its maxima rose.
  alignas(16) u32 weights[S::kGroups][S::kRowTiles][S::kReplicated ? 1 : S::kHeadTiles][2][S::kReplicated ? 4 : 32];
  float rescale[S::kGroups][S::kHeads];
  float norm[S::kGroups][S::kHeads];
  alignas(16) int grown[S::kGroups][4];
  float2 sums[S::kStreams * (S::kLateQuery ? 2 : 1)][S::kStreams > 1 ? S::kHeads : 1];  // maximum and sum of a stream's rows; query_max
  alignas(16) int ring[S::kStreams][S::kIndexTiles][S::kRows];  // indices of the coming tiles
  typename S::RowMask live[kMaxColumns / S::kRows + S::kStreams];  // bit per column: its index names a row; later per listed tile
  u16 list[kMaxColumns / S::kRows + 2 * S::kStreams];  // tiles with at least one such column
  int tiles_live;
  // What is needed once in a while, or after the last tile: registers are short in between.
  const int* indices;
  int columns, token, first_head_block;
  float kv_scale;

  // [slice, stream][head], fp8 only: largest magnitude of a part of Q, as the bits of a float. Where it is read beside the first
  // scores, in a place of its own.
  __device__ __forceinline__ u32* query_max(int part) {
    void* first = partial;
    if constexpr (S::kLateQuery) first = sums[S::kStreams];
    return static_cast<u32*>(first) + part * S::kHeads;
  }
};

// Which part of the block's work a warp does.
template <class S>
struct Place {
  int warp, slice, stream, group;
  __device__ __forceinline__ Place() {
    warp = threadIdx.x / 32;
    if constexpr (S::kUniformWarp) warp = __shfl_sync(kFullWarp, warp, 0);
    slice = warp % S::kSlices;
    stream = S::kStreams > 1 ? warp / S::kSlices : 0;
    group = S::kGroups > 1 ? warp / S::kGroupWarps : 0;
  }
  // The n8 tile of the heads that this warp's head tile n is. Where each warp finishes one of them, that is its tile 0.
  __device__ __forceinline__ int head_tile(int n) const { return S::kReplicated ? n : (n + slice) % S::kHeadTiles; }
};
