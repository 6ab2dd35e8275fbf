// Fold: the partial sums of column sums, all layers in one launch; fold.cuh has the formulas.

#include "common.cuh"
#include "fold.cuh"

struct Fold {
    const FoldJob* jobs;
    const Share* shares;  // one for each block
};

static_assert(sizeof(Fold) == SIZEOF_Fold, "kernels and cafin_cupy/table.py disagree on Fold");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fold(const Fold args) {
    wait_for_previous_launch();
    allow_next_launch();
    const Share share = args.shares[blockIdx.x];
    const FoldJob job = args.jobs[share.item];
    fold_block(job, share.number);
}
