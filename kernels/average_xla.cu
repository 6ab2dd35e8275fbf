// Average, for XLA: the factors of one XLA call, a block for each layer, or for each layer of a stack of them. XLA passes each
// array as an argument of its own; all else is written into this source when a program is traced (adapters/jax_refresh.py):
//
//     ARGUMENTS         parameters of the kernel: `items`, the sums, the old factors, `used` and perhaps `averages`, `broken`
//     JOBS              a `case` for each block: its `AverageJob` job, but for what `items` says
//     KEEP, ADD, AFTER  the averaging rule
//
// Factors are written in place: XLA gives output and input the same memory, and copies the input there first where its
// caller keeps it. Moving averages that are normalised afterwards are of float here, as JAX's state has them.

#include "common.cuh"
#include "average.cuh"

struct Item {
    A H_mean, S_mean;  // multiply the sums
    A entry;           // the last of H where its sums give one less
    A seen;            // 0: the layer keeps its factors
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) average_xla(ARGUMENTS) {
    __shared__ AverageJob job;
    const A seen = items[blockIdx.x].seen;
    bool nan = false;
    if (seen != A(0)) {
        if (threadIdx.x == 0) {
            const Item item = items[blockIdx.x];
            switch (blockIdx.x) { JOBS }
            job.H.mean = item.H_mean, job.H.entry = item.entry, job.S.mean = item.S_mean;
        }
        __syncthreads();
        Average rule = {};
        rule.keep = KEEP, rule.add = ADD, rule.after = AFTER, rule.grad_scale = 1;
        nan = !refresh<A>(job, rule);
    }
    if (threadIdx.x == 0) broken[blockIdx.x] = nan;
}
