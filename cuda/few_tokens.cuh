// The main kernel for few tokens. A block has a multiprocessor to itself and little to do: one token, 8 or 16 heads, and a split of
// some dozen index columns. A warp to a scheduler takes 3 to 4 clocks an instruction, so what counts is how many stand one behind
// the other. Against `sparse_mla`, which is made for blocks that find work to hide behind:
//
//   - one stream of four slices: no streams to join in the end;
//   - the first rows are asked for as soon as the columns are known. Q lies where the last piece of the ring will, and is read, and
//     for fp8 converted, while they are on their way; each warp converts its part by itself;
//   - nothing is copied for tiles that do not exist, and addresses of the end are known before the first tile;
//   - token and head block are coordinates of the grid, x and z: no division.
#pragma once
#include "outcome.cuh"

template <class S>
__device__ __forceinline__ void few_tokens(const SparseMla& a) {
  extern __shared__ __align__(1024) u8 dynamic_shared[];
  Shared<S>& sm = *reinterpret_cast<Shared<S>*>(dynamic_shared);
  const int lane = threadIdx.x % 32;
  const Place<S> place;
  const int warp = place.warp, slice = place.slice;
  const int token = blockIdx.x, head_block = blockIdx.z, first_head = head_block * S::kHeads;
  const int first_column = blockIdx.y * a.split_columns;
  // The merge: its blocks wait wherever this kernel leaves room. Called at once they are in the way of this kernel's start: called when
  // the rows have been asked for, one token of 64 heads in fp8 takes 4 % less. With blocks of 16 heads in bf16 8 tokens take 2 % more.
  constexpr bool kLateMerge = S::kHeads == 8 || S::kFp8;
  if (!kLateMerge && gridDim.y > 1) launch_dependents();
  const int columns = max(0, min(a.columns - first_column, a.split_columns));
  const int* idx = a.indices + token * a.index_stride + first_column;
  u8* region = sm.tiles[slice];
  constexpr int kTilesHeld = S::kRing / S::kPieces;
  static_assert(S::kRing % S::kPieces == 0, "whole tiles");

  // Two latencies in one. Columns first, since the rows wait for them, but where the way of Q is as long: 1 to 2 % at one token of 8
  // heads in fp8; with 16 the columns would wait too long. Past the last head nothing is read.
  u8* query_stage = region + (S::kRing - 1) * S::kPieceBytes;
  static_assert(S::kQueryBytes <= S::kPieceBytes, "Q where the last piece will lie");
  const auto ask_for_query = [&] {
    constexpr int kChunks = S::kSliceDims / 8, kTogether = 32 / kChunks;
    const int chunk = lane % kChunks;
    const u8* source = a.q + token * a.q_token_stride + (first_head + lane / kChunks) * a.q_head_stride +
                       slice * S::kSliceDims * 2 + 16 * chunk;
#pragma unroll
    for (int head = lane / kChunks; head < S::kHeads; head += kTogether) {
      copy16_async(shared_address(query_stage) + swizzled(head, chunk, S::kSliceDims * 2), source, first_head + head < a.heads);
      source += kTogether * a.q_head_stride;
    }
    commit_copies();
  };
  const float kv_scale = a.kv_scale != nullptr ? __ldg(a.kv_scale) : 1.0f;
  constexpr bool kQueryFirst = S::kFp8 && S::kHeads == 8;
  if constexpr (kQueryFirst) ask_for_query();
  const auto meanwhile = [&] {
    if constexpr (!kQueryFirst) ask_for_query();
  };
  constexpr int kVeryFew = 64;  // columns: a quarter of the words to find places for
  const bool few = columns <= kAheadColumns;
  if (columns <= kVeryFew) scan_few_columns<S, kVeryFew>(sm, idx, columns, a.rows, meanwhile);
  else if (few) scan_few_columns(sm, idx, columns, a.rows, meanwhile);
  else scan_columns(sm, idx, columns, a.rows, meanwhile);
  if (!few && threadIdx.x == 0) {  // more than the ring holds
    sm.indices = idx;
    sm.columns = columns;
  }
  __syncthreads();
  if (!few) {
    if (warp == 0) list_live_tiles(sm, columns);
    __syncthreads();
  }
  const int tiles = sm.tiles_live;
  if (tiles == 0 && gridDim.y > 1) {
    if (warp == 0) Partial::of<S>(a, token, head_block).template leave_nothing<S>();
    wait_copies<0>();
    return;
  }
  if (!few) {
    fill_ring(sm, idx, columns, tiles);
    __syncthreads();
  }

  const u32 ring = shared_address(region);
  u32 keys = ring + keys_lane(), values_of_bf16 = ring + values_lane();
  Source source = {a.kv + slice * S::kPieces * kPieceRowBytes + 16 * (lane % 8), a.kv_stride, static_cast<u32>(a.rows),
                   ring + swizzled(lane / 8, lane % 8, kPieceRowBytes)};
  if constexpr (S::kKeepsKeys) keep(keys);
  if constexpr (S::kKeepsTargets && !S::kFp8) keep(values_of_bf16);
  const u32& values = S::kFp8 ? keys : values_of_bf16;  // the lanes' rows of e4m3 are the same for K and V
  keep(source.base);
  if constexpr (S::kKeepsTargets) keep(source.target);
  TileRows<S> next;
  Query<S> q;
#pragma unroll
  for (int piece = 0; piece < S::kRing; ++piece) {
    if (piece + 1 == S::kRing) {
      wait_copies<S::kRing - 1>();
      __syncwarp();
      load_query<S>(q, query_stage, place);
      __syncwarp();
    }
    if (piece / S::kPieces < tiles) {
      if (piece % S::kPieces == 0) next.read(sm, place, piece / S::kPieces);
      copy_piece<S>(source, piece * S::kPieceBytes, piece % S::kPieces, next);
    }
    commit_copies();  // as many groups whatever there is
  }
  float inverse[S::kHeadTiles][2];  // fp8: of what this warp's part of Q was multiplied with
  if constexpr (S::kFp8) convert_own_query<S>(q, inverse);
  float scale[S::kHeadTiles][2];
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) scale[n][0] = scale[n][1] = a.scale * kv_scale;
  auto partial = Partial::of<S>(a, token, head_block);
  keep(partial.outputs);  // known before the first tile, not where they are used
  keep(partial.sums);

  if (kLateMerge && gridDim.y > 1) launch_dependents();
  Output<S> o = {};
  Running<S::kHeadTiles> running;
  running.start();
  const float limit = weight_limit<S>(tiles * S::kRows);
  int first = 0;  // place in the ring of the tile's first piece
  for (int t = 0; t < tiles; ++t) {
    const u32 live = sm.live[t];
    const int buffer = t % 2;
    const bool more = t + kTilesHeld < tiles;  // a tile takes the place of this one
    Scores<S> s;
    {
      ScoreSets<S> sets[S::kRowTiles] = {};
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece) {
        wait_piece<S>(piece);
#pragma unroll
        for (int r = 0; r < S::kRowTiles; ++r) multiply_keys<S>(sets[r], q, r, keys, piece_offset<S>(first, piece), piece);
      }
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        join_sets<S>(s[r], sets[r]);
        if constexpr (S::kFp8) {
#pragma unroll
          for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[r][n][i] *= inverse[n][i % 2];
          }
        }
      }
    }
    publish_scores<S>(sm, s, buffer, place);
    __syncthreads();
    add_slices<S>(s, sm, buffer);
    // Before the barrier these would hold it up, and what follows it: 2 to 4 %.
    Values<S> v[S::kPieces][S::kRowTiles];
#pragma unroll
    for (int piece = 0; piece < S::kPieces; ++piece) {
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) load_values<S>(v[piece][r], r, values, piece_offset<S>(first, piece), 0);
    }
    const bool mine = t % S::kSlices == slice;
    if (mine && t + S::kIndexTiles < tiles) prefetch_indices(sm, 0, t + S::kIndexTiles, tiles);
    Weights<S> p;
    weigh_all<S>(s, scale, live, limit, running, o, p);
#pragma unroll
    for (int piece = 0; piece < S::kPieces; ++piece) {
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) multiply_values<S>(o, p, r, v[piece][r], piece * S::kPieceTiles);
    }
    if (more) next.read(sm, place, t + kTilesHeld);
    __syncwarp();  // the warp has read the pieces that are filled again
#pragma unroll
    for (int piece = 0; piece < S::kPieces; ++piece) {
      if (more) copy_piece<S>(source, piece_offset<S>(first, piece), piece, next);
      commit_copies();
    }
    first = first + S::kPieces < S::kRing ? first + S::kPieces : 0;
  }
  wait_copies<0>();
  __syncwarp();

  running.finish();
  float norm[S::kHeadTiles][2];
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) norm[n][i] = running.sum[n][i] == 0.0f ? 0.0f : reciprocal(running.sum[n][i]);
  }
  const bool has_sums = warp == 0 && lane < 4;
  if (gridDim.y == 1) {
    write_rows<S>(region, a, o, norm, kv_scale, token, head_block, slice);
  } else {
    leave_quarter<S>(partial, o, norm, kv_scale, slice);
  }
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    if (!has_sums) continue;
    const int head = 8 * n + 2 * lane;
    if (gridDim.y > 1) partial.leave_sums(head, running.maximum[n], running.sum[n]);
    else write_lse<S>(a, token, first_head + head, running.maximum[n], running.sum[n]);
  }
}
