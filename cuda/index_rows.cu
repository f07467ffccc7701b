// From the indexer's request-local token positions to rows of the flat view of the KV cache.
//
// Block sizes are not powers of two (4352, 2304, ...) and other layers' pages lie between the blocks, so a block begins every
// `block_stride_rows` rows. Everything that does not name a written row becomes -1: positions at or beyond the sequence length,
// blocks beyond the table, blocks that are not allocated, and whole rows of stale requests in a padded CUDA graph.
//
// With decode context parallelism a rank holds every `world`-th group of `interleave` consecutive positions; the others are
// another rank's business and become -1 here. With world = 1 the mapping is the identity.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
    index_rows(const int* __restrict__ topk, i64 topk_stride, const int* __restrict__ request_of_token,
               const int* __restrict__ sequence_lengths, int requests, const int* __restrict__ block_table, i64 table_stride,
               int table_width, u32 block_size, int block_stride_rows, u32 world, u32 rank, u32 interleave, int* __restrict__ out,
               i64 out_stride, int width) {
  const int token = blockIdx.x;
  const int request = request_of_token[token];
  const bool known = static_cast<u32>(request) < static_cast<u32>(requests);
  const int length = known ? sequence_lengths[request] : 0;
  const int* blocks = block_table + (known ? request * table_stride : 0);
  const int* positions = topk + token * topk_stride;
  int* rows = out + token * out_stride;
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    const int position = known ? positions[column] : -1;
    int row = -1;
    if (position >= 0 && position < length) {
      const u32 global = position;
      const bool ours = world == 1 || global / interleave % world == rank;
      const u32 local = world == 1 ? global : global / (world * interleave) * interleave + global % interleave;
      const u32 block_column = local / block_size;
      if (ours && block_column < static_cast<u32>(table_width)) {
        const int block = blocks[block_column];
        const i64 target = static_cast<i64>(block) * block_stride_rows + local % block_size;
        if (block >= 0 && target <= 0x7fffffff) row = static_cast<int>(target);
      }
    }
    rows[column] = row;
  }
}
