// Fold, for XLA: the partial sums of column_sums_xla.cu. What is fixed when a program is traced is written into this source
// (adapters/jax_sums.py):
//
//     FIRST, SECOND  fields of the two jobs, whose arrays are called partial0, partial1 and sums0, sums1
//     BOUNDARY       blocks of the first

#include "common.cuh"
#include "fold.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    fold_xla(const A* partial0, const A* partial1, A* sums0, A* sums1) {
    const int block = blockIdx.x;
    const FoldJob job = block < BOUNDARY ? FoldJob{FIRST} : FoldJob{SECOND};
    fold_block(job, block < BOUNDARY ? block : block - BOUNDARY);
}
