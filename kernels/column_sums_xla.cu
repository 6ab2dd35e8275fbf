// Column sums, for XLA: input and output gradient of one layer in one launch. XLA passes each array as an argument of its
// own; all else is written into this source when a program is traced (adapters/jax_sums.py):
//
//     FIRST, SECOND  fields of the two operands, whose arrays are called x0, x1 and partial0, partial1

#include "common.cuh"
#include "column_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    column_sums_xla(const void* x0, const void* x1, A* partial0, A* partial1) {
    __shared__ Partial partial;
    __shared__ A total[WIDE];
    const Operand second = {SECOND};
    const Operand o = blockIdx.x < second.first ? Operand{FIRST} : second;
    sum_columns(o, blockIdx.x - o.first, partial, total);
}
