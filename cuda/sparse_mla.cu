// Sparse MLA attention without rope: one block works on one token, one block of heads and one range of index columns (a split).
//
//     s[k] = scale * dot(q[t, h, :], kv[idx[t, k], :])     out[t, h, :] = sum_k softmax(s)[k] * kv[idx[t, k], :]
//
// Entry points are added by SPARSE_MLA_VARIANT, one per compiled program, with C linkage so that they are found by name.
#include "softmax.cuh"

struct SparseMla {
  const u8* q;            // [tokens, heads, 512] bf16; strides in bytes, multiples of 16
  i64 q_token_stride;
  i64 q_head_stride;
  const u8* kv;           // [rows, 512] bf16 or e4m3
  u32 kv_stride;          // bytes from row to row, a multiple of 16
  int rows;
  const int* indices;     // [tokens, columns]; anything outside [0, rows) is skipped
  i64 index_stride;       // elements
  int columns;
  int split_columns;      // columns of a split, a multiple of 32
  int heads;
  int head_blocks;
  float scale;            // softmax scale times log2(e)
  const float* kv_scale;  // one number, or null for 1
  u8* out;                // [tokens, heads, 512] bf16
  i64 out_token_stride;
  i64 out_head_stride;
  float* lse;             // [tokens, heads] or null
  i64 lse_stride;         // elements
  // With more than one split: [token, split, head block] of output fragments and of (maximum, sum) per head.
  float4* partial_output;
  float2* partial_sums;
};

// Writes the outcome of a block: either final rows, or fragments for the merge. `norm` is 1 / sum, or 0 for an empty row.
template <class S>
__device__ __forceinline__ void write_block(Shared<S>& sm, const SparseMla& a, const Output<S>& o, float (&norm)[S::kHeadTiles][2],
                                            float kv_scale, int token, int head_block, int slice, int group) {
  const int lane = threadIdx.x % 32;
  const int first_head = head_block * S::kHeads + group * S::kGroupHeads;
  if (gridDim.y == 1) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      norm[n][0] *= kv_scale;
      norm[n][1] *= kv_scale;
    }
    u8* stage = staging(sm, slice, group);
    stage_output<S>(stage, o, norm);
    __syncwarp();
    u8* out = a.out + token * a.out_token_stride + first_head * a.out_head_stride + slice * kSliceDims * 2;
    store_output<S>(stage, out, a.out_head_stride, a.heads - first_head);
    return;
  }
  const i64 block = (static_cast<i64>(token) * gridDim.y + blockIdx.y) * a.head_blocks + head_block;
  constexpr int kFragments = kDimTiles * S::kHeadTiles * 32;
  float4* partial = a.partial_output + (block * S::kWarps + group * kSlices + slice) * kFragments + lane;
#pragma unroll
  for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      partial[(d * S::kHeadTiles + n) * 32] = make_float4(o[d][n][0] * kv_scale, o[d][n][1] * kv_scale, o[d][n][2] * kv_scale,
                                                          o[d][n][3] * kv_scale);
    }
  }
}

// Maximum and sum of one head: the log-sum-exp, or the pair that the merge needs.
template <class S>
__device__ __forceinline__ void write_sums(const SparseMla& a, int token, int head_block, int head, float maximum, float sum) {
  const int row = head_block * S::kHeads + head;
  if (gridDim.y > 1) {
    const i64 block = (static_cast<i64>(token) * gridDim.y + blockIdx.y) * a.head_blocks + head_block;
    a.partial_sums[block * S::kHeads + head] = make_float2(maximum, sum);
  } else if (a.lse != nullptr && row < a.heads) {
    a.lse[token * a.lse_stride + row] = natural_lse(maximum, sum);
  }
}

template <class S>
__device__ __forceinline__ void sparse_mla(const SparseMla& a) {
  extern __shared__ __align__(1024) u8 dynamic_shared[];
  Shared<S>& sm = *reinterpret_cast<Shared<S>*>(dynamic_shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slice = warp % kSlices, group = warp / kSlices;
  const int token = blockIdx.x / a.head_blocks, head_block = blockIdx.x % a.head_blocks;
  const int first_head = head_block * S::kHeads + group * S::kGroupHeads;
  const int first_column = blockIdx.y * a.split_columns;
  const int columns = max(0, min(a.columns - first_column, a.split_columns));
  const int* idx = a.indices + token * a.index_stride + first_column;
  const Source source = {a.kv + slice * S::kSliceBytes + 16 * TileRows<S>::chunk(), a.kv_stride, static_cast<u32>(a.rows)};

  // Q and the index columns are fetched together: two latencies in one.
  u8* stage = staging(sm, slice, group);
  stage_query<S>(stage, a.q + token * a.q_token_stride + first_head * a.q_head_stride + slice * kSliceDims * 2, a.q_head_stride,
                 a.heads - first_head);
  scan_columns(sm, idx, columns, a.rows);
  const float kv_scale = a.kv_scale != nullptr ? __ldg(a.kv_scale) : 1.0f;
  wait_copies<0>();
  __syncwarp();
  Query<S> q;
  load_query<S>(q, stage);
  if constexpr (S::kFp8) publish_query_max(sm, q, slice, group);
  __syncthreads();
  if (warp == 0) list_live_tiles(sm, columns);
  constexpr int kOwnTiles = S::kReplicated ? S::kHeadTiles : 1;  // head tiles whose softmax this warp computes
  const int own_head = group * S::kGroupHeads + (S::kReplicated ? 0 : 8 * slice) + 2 * (lane % 4);
  float scale[kOwnTiles][2];
#pragma unroll
  for (int n = 0; n < kOwnTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // The product with kv_scale, 1 for bf16, keeps the scale in a register: a bare parameter that is used under a condition
      // is loaded from the constant bank at every use.
      scale[n][i] = a.scale * kv_scale;
      if constexpr (S::kFp8) scale[n][i] *= query_inverse_factor(query_exponent(sm, own_head + 8 * n + i));
    }
  }
  if constexpr (S::kFp8) convert_query(sm, q, group);
  __syncthreads();
  const int tiles = sm.tiles_live;
  fill_ring(sm, idx, columns, tiles);
  __syncthreads();

  Output<S> o = {};
  Running<kOwnTiles> running;
  running.start();

  // A slice that belongs to one warp is gathered, read and refilled by that warp alone. A slice shared by two warps needs the
  // block: its tile has arrived, and its slot is free, after the barrier that hands the weights round.
  constexpr bool kPrivate = S::kGroups == 1;
  constexpr int kFirst = kPrivate ? S::kSlots : S::kSlots - 1;  // tiles asked for before the loop
  TileRows<S> next;
#pragma unroll
  for (int t = 0; t < kFirst; ++t) {
    next.read(sm, group, t);
    gather_tile(sm, source, slice, group, t, tiles, next);
  }
  if constexpr (!kPrivate) {
    wait_copies<S::kSlots - 2>();
    __syncthreads();
  }
  const auto gather_next = [&](int t) {
    constexpr int kTilesPerFetch = 32 / S::kRows;
    if (t % kTilesPerFetch == 0 && t / kTilesPerFetch % S::kWarps == warp) prefetch_indices(sm, idx, columns, t + S::kRing, tiles);
    gather_tile(sm, source, slice, group, t + kFirst, tiles, next);
  };
  u32 live = live_rows(sm, tiles > 0 ? sm.list[0] : 0);
  for (int t = 0; t < tiles; ++t) {
    const u32 tile = shared_address(&sm.tiles[slice][t % S::kSlots * S::kTileBytes]);
    const float limit = weight_limit(t);
    if constexpr (kPrivate) {
      wait_copies<S::kSlots - 1>();
      __syncwarp();
    }
    Scores<S> s;
    multiply_keys<S>(s, q, tile);
    Weights<S> p;
    if constexpr (S::kReplicated) {
      if constexpr (S::kBuffers == 1) __syncthreads();  // everyone has read the scores of the tile before
      const int buffer = t % S::kBuffers;
      publish_scores<S>(sm, s, buffer, slice);
      Values<S> v[S::kRowTiles];  // registers allow it here: loaded while the others arrive
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) load_values<S>(v[r], r, tile);
      next.read(sm, group, t + kFirst);
      __syncthreads();
      sum_scores<S>(s, sm, buffer);
      gather_next(t);  // the values are in registers: the slot is free long before the tile is done
      weigh_all<S>(s, scale, live, limit, running, o, p);
      live = live_rows(sm, sm.list[min(t + 1, tiles - 1)]);
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) multiply_values<S>(o, p, r, v[r]);
    } else {
      publish_scores<S>(sm, s, group, slice);
      named_barrier<32 * kSlices>(1 + group);
      weigh_own<S>(sm, slice, group, scale, live, limit, running);
      live = live_rows(sm, sm.list[min(t + 1, tiles - 1)]);
      next.read(sm, group, t + kFirst);
      if constexpr (!kPrivate) wait_copies<S::kSlots - 3>();
      __syncthreads();
      collect_weights<S>(sm, group, o, p);
      if constexpr (!kPrivate) gather_next(t);
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        Values<S> v;
        load_values<S>(v, r, tile);
        multiply_values<S>(o, p, r, v);
      }
    }
    if constexpr (kPrivate && !S::kReplicated) {
      __syncwarp();  // the warp has read the slot that is filled again
      gather_next(t);
    }
  }
  wait_copies<0>();

  running.finish();
  float norm[S::kHeadTiles][2];
  const bool writes_sums = (!S::kReplicated || slice == 0) && lane < 4;
#pragma unroll
  for (int n = 0; n < kOwnTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float inverse = running.sum[n][i] == 0.0f ? 0.0f : 1.0f / running.sum[n][i];
      if (writes_sums) write_sums<S>(a, token, head_block, own_head + 8 * n + i, running.maximum[n][i], running.sum[n][i]);
      if constexpr (S::kReplicated) {
        norm[n][i] = inverse;
      } else if (lane < 4) {
        sm.norm[own_head + i] = inverse;
      }
    }
  }
  if constexpr (!S::kReplicated) {
    __syncthreads();  // also: both warps of a shared slice are done with its last tile, which the staging overwrites
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) norm[n][i] = sm.norm[group * S::kGroupHeads + 8 * n + 2 * (lane % 4) + i];
    }
  } else {
    __syncwarp();
  }
  write_block<S>(sm, a, o, norm, kv_scale, token, head_block, slice, group);
}

#define SPARSE_MLA_VARIANT(name, heads, fp8, tile_rows, slots, blocks, bytes)                                                   \
  static_assert(sizeof(Shared<Shape<heads, fp8, tile_rows, slots>>) == bytes, "shared memory that the launcher asks for");      \
  extern "C" __global__ void __launch_bounds__(Shape<heads, fp8, tile_rows, slots>::kThreads, blocks) name(                     \
      const u8* q, i64 q_token_stride, i64 q_head_stride, const u8* kv, u32 kv_stride, int rows, const int* indices,            \
      i64 index_stride, int columns, int split_columns, int real_heads, int head_blocks, float scale, const float* kv_scale,    \
      u8* out, i64 out_token_stride, i64 out_head_stride, float* lse, i64 lse_stride, float4* partial_output,                   \
      float2* partial_sums) {                                                                                                   \
    sparse_mla<Shape<heads, fp8, tile_rows, slots>>(SparseMla{q, q_token_stride, q_head_stride, kv, kv_stride, rows, indices,   \
                                                              index_stride, columns, split_columns, real_heads, head_blocks,    \
                                                              scale, kv_scale, out, out_token_stride, out_head_stride, lse,     \
                                                              lse_stride, partial_output, partial_sums});                       \
  }
