// Movement from global to shared memory, always in chunks of 16 bytes. Chunk c of row r lies at c ^ (r & 7): conflict-free
// for the copies that write rows, for ldmatrix that reads eight rows of one chunk, and for its transposing form.
#pragma once
#include "columns.cuh"

__device__ __forceinline__ u32 swizzled(int row, int chunk, int row_bytes) {
  return static_cast<u32>(row * row_bytes + ((chunk ^ (row & 7)) << 4));
}

// Distance of a piece from the start of its ring: `first` is the place of its tile's first piece.
template <class S>
__device__ __forceinline__ u32 piece_offset(int first, int piece) {
  int place = first + piece;
  if (S::kRing % S::kPieces != 0 && place >= S::kRing) place -= S::kRing;
  return place * S::kPieceBytes;
}

// What a lane copies of a piece: one chunk of every fourth row.
template <class S>
struct TileRows {
  static constexpr int kCount = S::kRows / 4;
  int row[kCount];

  // From the index ring, apart from the copies: the compiler may not move a load over a copy, and eight times the latency of
  // shared memory one after the other cost more than the products.
  __device__ __forceinline__ void read(const Shared<S>& sm, const Place<S>& place, int position) {
    const int* entries = &sm.ring[place.stream][position % S::kIndexTiles][threadIdx.x % 32 / 8 * kCount];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(entries + i);
      row[i] = four.x;
      row[i + 1] = four.y;
      row[i + 2] = four.z;
      row[i + 3] = four.w;
    }
  }
};

// The latent rows as one lane sees them, and where it puts them.
struct Source {
  const u8* base;  // this lane's chunk of row 0
  u32 stride;
  u32 rows;
  u32 target;  // shared address of the lane's first chunk in the first piece of the ring
};

// One piece of this warp's slice, `offset` from the start of the ring. Rows without a valid index become zeros and are never read.
// The rows of a lane are four apart, so the swizzle of their chunk differs in one bit.
template <class S>
__device__ __forceinline__ void copy_piece(const Source& source, u32 offset, int piece, const TileRows<S>& rows) {
#pragma unroll
  for (int i = 0; i < TileRows<S>::kCount; ++i) {
    const u32 row = rows.row[i];
    copy16_async((source.target ^ (i % 2 << 6)) + offset + i * 4 * kPieceRowBytes,
                 source.base + static_cast<u64>(row) * source.stride + piece * kPieceRowBytes, row < source.rows);
  }
}

// Commits a group as well: the count of groups says which piece has arrived.
template <class S>
__device__ __forceinline__ void gather_piece(const Source& source, u32 offset, int piece, const TileRows<S>& rows) {
  copy_piece<S>(source, offset, piece, rows);
  commit_copies();
}

// Waits for piece `piece` of the next tile: kRing pieces have been asked for from that tile's first one on.
template <class S>
__device__ __forceinline__ void wait_piece(int piece) {
  if (piece == 0) wait_copies<S::kRing - 1>();
  else if (piece == 1) wait_copies<S::kRing - (S::kPieces > 1 ? 2 : 1)>();
  else if (piece == 2) wait_copies<S::kRing - (S::kPieces > 2 ? 3 : 1)>();
  else wait_copies<S::kRing - (S::kPieces > 3 ? 4 : 1)>();
  __syncwarp();
}

// Q of the warp's slice into its staging area; heads beyond `heads` become zeros. Strides in bytes.
template <class S>
__device__ __forceinline__ void stage_query(u8* stage, const u8* __restrict__ q, i64 head_stride, int heads) {
  constexpr int kChunks = S::kSliceDims / 8, kTogether = 32 / kChunks;
  const int lane = threadIdx.x % 32, chunk = lane % kChunks;
#pragma unroll
  for (int head = lane / kChunks; head < S::kHeads; head += kTogether) {
    const bool on = head < heads;
    copy16_async(shared_address(stage) + swizzled(head, chunk, S::kSliceDims * 2), q + (on ? head * head_stride : 0) + 16 * chunk, on);
  }
  commit_copies();
}
