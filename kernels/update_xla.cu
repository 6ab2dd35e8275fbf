// Update, for XLA: the step of update.cuh for the arrays of one XLA call. XLA passes each array as an argument of its own, so
// what the other launches read from a table on the device is written into this source when a program is traced
// (adapters/jax_kernels.py):
//
//     ARGUMENTS  parameters of the kernel: `hypers`, then the arrays
//     FIRST      the first block of each item, and how many blocks there are
//     ITEMS      a `case` for each item: its `Parameter` t, and its gradients
//     KINDS      a `case` for each kind of parameter in the call
//
// An item is a parameter, or one layer of a stack of them. p and m are written in place: XLA gives output and input the same
// memory, and copies the input there first where its caller keeps it.

#include "common.cuh"
#include "rounding.cuh"
#include "update.cuh"

__constant__ int first[] = {FIRST};
constexpr int COUNT = sizeof(first) / sizeof(int) - 1;

extern "C" __global__ void __launch_bounds__(THREADS) update_xla(ARGUMENTS) {
    const int block = blockIdx.x;
    int item = 0;
    for (int stop = COUNT; stop - item > 1;) {
        const int middle = (item + stop) / 2;
        if (first[middle] <= block) item = middle;
        else stop = middle;
    }
    Parameter t = {};
    const void* gradients = nullptr;
    switch (item) { ITEMS }
    const Hyper h = hypers[t.hyper];  // a copy: what is written may not change it, as the compiler can see
    switch (t.kind) { KINDS }
}
