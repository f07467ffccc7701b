// Sparse MLA attention without rope: one block works on one token, one or two head blocks and one range of index columns (a split).
//
//     s[k] = scale * dot(q[t, h, :], kv[idx[t, k], :])     out[t, h, :] = sum_k softmax(s)[k] * kv[idx[t, k], :]
//
// Entry points are added by SPARSE_MLA_VARIANT, one per compiled program, with C linkage so that they are found by name.
#include "few_tokens.cuh"

template <class S>
__device__ __forceinline__ void sparse_mla(const SparseMla& a) {
  extern __shared__ __align__(1024) u8 dynamic_shared[];
  Shared<S>& sm = *reinterpret_cast<Shared<S>*>(dynamic_shared);
  const int lane = threadIdx.x % 32;
  const Place<S> place;
  const int warp = place.warp, slice = place.slice, stream = place.stream;
  const u32 token_blocks = static_cast<u32>(a.head_blocks) / S::kGroups;
  const int token = blockIdx.x / token_blocks, head_block = blockIdx.x % token_blocks * S::kGroups + place.group;
  const int first_head = head_block * S::kHeads;
  const int first_column = blockIdx.y * a.split_columns;
  if (gridDim.y > 1) launch_dependents();  // the merge: its blocks wait wherever this kernel leaves room
  const int columns = max(0, min(a.columns - first_column, a.split_columns));
  const int* idx = a.indices + token * a.index_stride + first_column;
  u8* region = sm.tiles[stream * S::kSlices + slice];
  u8* stage = region + place.group * S::kQueryBytes;

  const float kv_scale = a.kv_scale != nullptr ? __ldg(a.kv_scale) : 1.0f;
  // Q and the index columns are fetched together: two latencies in one.
  const bool few = columns <= kAheadColumns;
  const auto ask_for_query = [&] {
    stage_query<S>(stage, a.q + token * a.q_token_stride + first_head * a.q_head_stride + slice * S::kSliceDims * 2, a.q_head_stride,
                   a.heads - first_head);
  };
  constexpr bool kQueryFirst = S::kHeads > 8;  // the more heads, the more Q there is
  if constexpr (kQueryFirst) ask_for_query();
  const auto meanwhile = [&] {
    if constexpr (!kQueryFirst) ask_for_query();
  };
  if (few) scan_few_columns(sm, idx, columns, a.rows, meanwhile);
  else scan_columns(sm, idx, columns, a.rows, meanwhile);
  if (threadIdx.x == 0) {
    sm.indices = idx;
    sm.columns = columns;
    sm.token = token;
    sm.first_head_block = head_block;
    sm.kv_scale = kv_scale;
  }
  wait_copies<0>();
  __syncwarp();
  Query<S> q;
  load_query<S>(q, stage, place);
  if constexpr (S::kFp8) publish_query_max(sm, q, place);
  __syncthreads();
  if (!few && warp == 0) list_live_tiles(sm, columns);
  constexpr int kOwnTiles = S::kReplicated ? S::kHeadTiles : 1;  // head tiles whose softmax this warp computes
  const int own_head = (S::kReplicated ? 0 : 8 * slice) + 2 * (lane % 4);
  float scale[kOwnTiles][2];
#pragma unroll
  for (int n = 0; n < kOwnTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // The product with kv_scale, 1 for bf16, keeps the scale in a register: a bare parameter that is used under a condition
      // is loaded from the constant bank at every use.
      scale[n][i] = a.scale * kv_scale;
      if constexpr (S::kFp8) scale[n][i] *= half_inverse_factor(query_exponent(sm, own_head + 8 * n + i));
    }
  }
  if constexpr (S::kFp8 && !S::kLateQuery) convert_query(sm, q, place);
  // 32 heads in fp8 are a few registers short: the two factors of an owner lie where its norms will be.
  constexpr bool kScarce = S::kFp8 && S::kHeads == 32;
  if constexpr (kScarce) {
    if (lane < 4) *reinterpret_cast<float2*>(&sm.norm[place.group][own_head]) = make_float2(scale[0][0], scale[0][1]);
  }
  const auto load_scale = [&] {
    if constexpr (kScarce) {
      const float2 stored = *reinterpret_cast<const float2*>(&sm.norm[place.group][own_head]);
      scale[0][0] = stored.x;
      scale[0][1] = stored.y;
    }
  };
  if ((S::kFp8 && !S::kLateQuery) || !few) __syncthreads();
  const int listed = sm.tiles_live;
  if (listed == 0 && gridDim.y > 1) {  // nothing to leave but that
    const float none[2] = {kLowest, kLowest}, zeros[2] = {0.0f, 0.0f};
    const auto partial = Partial::of<S>(a, sm.token, sm.first_head_block + place.group);
    if (warp % S::kGroupWarps == 0 && lane < S::kHeads / 2) partial.leave_sums(2 * lane, none, zeros);
    return;
  }
  if (!few) {
    fill_ring(sm, idx, columns, listed);
    __syncthreads();
  }
  // Of each stream: every other one of the list. The last one of the second stream may be empty: with as many barriers in either,
  // racecheck can follow them.
  const int tiles = (listed + S::kStreams - 1) / S::kStreams;
  const auto live_of = [&](int t) -> u32 { return sm.live[t * S::kStreams + stream]; };

  Output<S> o = {};
  Running<kOwnTiles> running;
  running.start();

  // A slice is gathered, read and refilled by its warp alone, piece by piece. Where two groups share the tiles, both read it.
  const u32 ring = shared_address(region);
  u32 keys = ring + keys_lane(), values_of_bf16 = ring + values_lane();
  Source source = {a.kv + slice * S::kPieces * kPieceRowBytes + 16 * (lane % 8), a.kv_stride, static_cast<u32>(a.rows),
                   ring + swizzled(lane / 8, lane % 8, kPieceRowBytes)};
  if constexpr (S::kKeepsKeys) keep(keys);
  if constexpr (S::kKeepsTargets && !S::kFp8) keep(values_of_bf16);
  const u32& values = S::kFp8 ? keys : values_of_bf16;  // the lanes' rows of e4m3 are the same for K and V
  keep(source.base);
  if constexpr (S::kKeepsTargets) keep(source.target);
  // Two groups share the tiles, half a tile apart: one multiplies while the other exchanges scores. They meet when the first one has
  // read a tile and the second one has its scores of it, and the next tile is there. The second one gathers: it reads last.
  const bool gathers = !S::kShared || place.group == 1;
  const auto group_barrier = [&] {
    if constexpr (S::kShared) named_barrier<128>(1 + place.group);
    else __syncthreads();
  };
  const auto meet = [&] { named_barrier<S::kThreads>(1 + S::kGroups); };
  const auto bring = [&](int t) {  // the second group: tile `t` is there, and the first one has read the tile before
    if (S::kShared && gathers) {
      if (t == 0) wait_copies<S::kPieces>();  // the tile after it has been asked for, too
      else wait_copies<0>();
      __syncwarp();
      if (t < tiles) meet();
    }
  };
  TileRows<S> next;
  if (gathers) {
#pragma unroll
    for (int piece = 0; piece < S::kRing; ++piece) {
      if (piece % S::kPieces == 0) next.read(sm, place, piece / S::kPieces);
      gather_piece<S>(source, piece * S::kPieceBytes, piece % S::kPieces, next);
    }
  }
  if constexpr (S::kLateQuery) convert_query(sm, q, place);  // while the first rows are on their way
  bring(0);
  int first = 0;  // place in the ring of the tile's first piece
  // The piece kRing pieces after piece `piece` of tile `t` takes the place of that one.
  const auto read_next = [&](int t, int piece) {
    const int ahead = piece + S::kRing;
    if (ahead % S::kPieces == 0) next.read(sm, place, t + ahead / S::kPieces);
  };
  const auto gather_next = [&](int target, int piece) {
    gather_piece<S>(source, piece_offset<S>(target, piece), (piece + S::kRing) % S::kPieces, next);
  };
  const auto prefetch = [&](int t) {
    constexpr int kTilesPerFetch = 32 / S::kRows;
    const bool mine = gathers && t / kTilesPerFetch % S::kSlices == slice;
    // Past the last tile as far as gathers look ahead: what stands in the ring there is old.
    const bool wanted = t + S::kIndexTiles < tiles + S::kTilesAhead;
    if (t % kTilesPerFetch == 0 && mine && wanted) prefetch_indices(sm, stream, t + S::kIndexTiles, tiles);
  };
  // Each warp of a stream says when it has read the other's partial scores.
  constexpr int kRead = 1 + S::kStreams;  // barriers of the warps
  constexpr bool kSingle = S::kReplicated && S::kBuffers == 1;
  if constexpr (kSingle) named_arrive<64>(kRead + (warp ^ 1));
  const float limit = weight_limit<S>(listed * S::kRows);
  for (int t = 0; t < tiles; ++t) {
    u32 live = S::kLateMask ? 0 : live_of(t);
    const int buffer = S::kBuffers > 1 ? t % 2 : 0;
    Weights<S> p;
    if constexpr (S::kReplicated) {
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
        for (int r = 0; r < S::kRowTiles; ++r) join_sets<S>(s[r], sets[r]);
      }
      if constexpr (kSingle) named_barrier<64>(kRead + warp);
      publish_scores<S>(sm, s, buffer, place);
      if constexpr (S::kEarlyValues) {
        Values<S> v[S::kPieces][S::kRowTiles];
#pragma unroll
        for (int piece = 0; piece < S::kPieces; ++piece) {
#pragma unroll
          for (int r = 0; r < S::kRowTiles; ++r) load_values<S>(v[piece][r], r, values, piece_offset<S>(first, piece), 0);
        }
        read_next(t, 0);
        named_barrier<64>(1 + stream);
        add_partner<S>(s, sm, buffer, place);
        prefetch(t);
#pragma unroll
        for (int piece = 0; piece < S::kPieces; ++piece) {
          if (piece > 0) read_next(t, piece);
          gather_next(first, piece);
        }
        weigh_all<S>(s, scale, live, limit, running, o, p);
#pragma unroll
        for (int piece = 0; piece < S::kPieces; ++piece) {
#pragma unroll
          for (int r = 0; r < S::kRowTiles; ++r) multiply_values<S>(o, p, r, v[piece][r], piece * S::kPieceTiles);
        }
      } else {
        if constexpr (!S::kFp8) read_next(t, 0);  // in fp8 it would hold the barrier up: 3 % at 1,024 tokens
        named_barrier<64>(1 + stream);
        add_partner<S>(s, sm, buffer, place);
        if constexpr (S::kFp8) read_next(t, 0);
        if constexpr (kSingle) named_arrive<64>(kRead + (warp ^ 1));
        weigh_all<S>(s, scale, live, limit, running, o, p);
      }
    } else {
      if constexpr (!S::kShared) wait_piece<S>(S::kPieces - 1);
      else if (!gathers) meet();
      float own[S::kRowTiles][1][4];
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        ScoreSets<S> sets = {};
#pragma unroll
        for (int piece = 0; piece < S::kPieces; ++piece) multiply_keys<S>(sets, q, r, keys, piece_offset<S>(first, piece), piece);
        float s[S::kHeadTiles][4];
        join_sets<S>(s, sets);
        deal_scores<S>(sm, s, r, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) own[r][0][i] = s[0][i];
      }
      bring(t + 1);
      group_barrier();
      if constexpr (S::kLateMask) live = live_of(t);
      add_dealt<S>(own, sm, place);
      load_scale();
      weigh_own<S>(sm, own, place, scale, live, limit, running);
      group_barrier();
      if (gathers) read_next(t, 0);
      collect_weights<S>(sm, p, place);
    }
    if constexpr (!S::kEarlyValues) {
      // Values are loaded one step ahead of their products. Steps go through the row tiles of some dims, then through the dims.
      constexpr int kPieceSteps = S::kPieceTiles / S::kStepTiles * S::kRowTiles, kSteps = S::kPieces * kPieceSteps;
      Values<S> v[2];
      const auto load_step = [&](int step) {
        const int within = step % kPieceSteps / S::kRowTiles * S::kStepTiles;
        load_values<S>(v[step % 2], step % S::kRowTiles, values, piece_offset<S>(first, step / kPieceSteps), within);
      };
      load_step(0);
      if constexpr (!S::kReplicated) follow_maxima<S>(sm, o, place);
      prefetch(t);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) load_step(step + 1);
        if (!S::kShared && step % kPieceSteps == kPieceSteps - 1) {
          const int piece = step / kPieceSteps;
          __syncwarp();  // the warp has read the piece that is filled again
          if (piece > 0) read_next(t, piece);
          gather_next(first, piece);
        }
        multiply_values<S>(o, p, step % S::kRowTiles, v[step % 2], step / S::kRowTiles * S::kStepTiles);
      }
      if (S::kShared && gathers && t + 2 < tiles) {  // between the products copies would hold those up: 8 % slower
        __syncwarp();
#pragma unroll
        for (int piece = 0; piece < S::kPieces; ++piece) gather_next(first, piece);
      }
    }
    first += first + S::kPieces < S::kRing ? S::kPieces : S::kPieces - S::kRing;
  }
  if constexpr (kSingle) named_barrier<64>(kRead + warp);
  wait_copies<0>();
  __syncwarp();  // the other lanes' copies as well: what follows overwrites the tiles

  running.finish();
  float norm[S::kHeadTiles][2];
  Quarter<S> outcome;
  if constexpr (S::kReplicated) {
    join_streams<S>(sm, place, o, outcome, running);
  } else {
#pragma unroll
    for (int d = 0; d < kQuarterTiles; ++d) {
#pragma unroll
      for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) outcome[d][n][i] = o[d][n][i];
      }
    }
  }
  const int own_head_block = sm.first_head_block + place.group;
  if constexpr (!S::kReplicated) {
    if (lane < 4) {
      if (gridDim.y > 1) Partial::of<S>(a, sm.token, own_head_block).leave_sums(own_head, running.maximum[0], running.sum[0]);
      else write_lse<S>(a, sm.token, own_head_block * S::kHeads + own_head, running.maximum[0], running.sum[0]);
    }
  }
#pragma unroll
  for (int n = 0; n < kOwnTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // With 32 heads in fp8 a division, since the loop that the compiler makes beside it takes 3 % less.
      const float sum = running.sum[n][i], inverse = sum == 0.0f ? 0.0f : kScarce ? 1.0f / sum : reciprocal(sum);
      if constexpr (S::kReplicated) {
        norm[n][i] = inverse;
      } else if (lane < 4) {
        sm.norm[place.group][own_head + i] = inverse;
      }
    }
  }
  if constexpr (!S::kReplicated) {
    __syncthreads();  // also for the tiles: another group may still read what the staging of rows overwrites
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) norm[n][i] = sm.norm[place.group][8 * n + 2 * (lane % 4) + i];
    }
  }
  const int quarter = S::kStreams > 1 ? slice * S::kStreams + stream : slice;
  // Where there is no barrier to wait at, sums are left last: the outputs are more.
  const bool has_sums = S::kReplicated && warp == 0 && lane < 4;
  if (gridDim.y == 1) {
    write_rows<S>(stage, a, outcome, norm, sm.kv_scale, sm.token, own_head_block, quarter);
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) {
      if (has_sums) write_lse<S>(a, sm.token, own_head_block * S::kHeads + own_head + 8 * n, running.maximum[n], running.sum[n]);
    }
  } else {
    const auto partial = Partial::of<S>(a, sm.token, own_head_block);
    leave_quarter<S>(partial, outcome, norm, sm.kv_scale, quarter);
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) {
      if (has_sums) partial.leave_sums(own_head + 8 * n, running.maximum[n], running.sum[n]);
    }
  }
}

#define SPARSE_MLA_VARIANT(name, heads, fp8, tile_rows, ring, groups, streams, blocks, bytes)                                 \
  using Shape_##name = Shape<heads, fp8, tile_rows, ring, groups, streams>;                                                   \
  static_assert(sizeof(Shared<Shape_##name>) == bytes, "shared memory that the launcher asks for");                           \
  extern "C" __global__ void __launch_bounds__(Shape_##name::kThreads, blocks) name(                                          \
      const u8* q, i64 q_token_stride, i64 q_head_stride, const u8* kv, u32 kv_stride, int rows, const int* indices,          \
      i64 index_stride, int columns, int split_columns, int real_heads, int head_blocks, float scale, const float* kv_scale,  \
      u8* out, i64 out_token_stride, i64 out_head_stride, float* lse, i64 lse_stride, uint4* partial_outputs,                 \
      float2* partial_sums) {                                                                                                 \
    const SparseMla call{q, q_token_stride, q_head_stride, kv, kv_stride, rows, indices, index_stride, columns, split_columns,  \
                         real_heads, head_blocks, scale, kv_scale, out, out_token_stride, out_head_stride, lse, lse_stride,     \
                         partial_outputs, partial_sums};                                                                        \
    if constexpr (Shape_##name::kFew) few_tokens<Shape_##name>(call);                                                           \
    else sparse_mla<Shape_##name>(call);                                                                                        \
  }
