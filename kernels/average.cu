// Average: all factors in one launch, one block per layer; average.cuh has the formulas.
//
// Where a loss scaler has found inf or NaN, the step does not happen and nothing changes: the kernel reads that verdict,
// and the scale, so that no host waits for them.

#include "common.cuh"
#include "average.cuh"

// True for all blocks alike: what they read changes with no launch but a later one.
__device__ inline bool keeps_all(const Average& rule) {
    return (rule.found_inf && *rule.found_inf != 0.0f) || (rule.missed && *rule.missed != rule.known);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) average(const Average args) {
    wait_for_previous_launch();
    allow_next_launch();
    if (keeps_all(args)) return;
    const AverageJob& job = args.jobs[blockIdx.x];
    if (!refresh<double>(job, args) && threadIdx.x == 0) ++*job.skipped;
}
