// Column sums of the inputs and output gradients of several layers in one launch; column_sums.cuh has the formula.

#include "common.cuh"
#include "column_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 4) column_sums(const ColumnSums args) {
    __shared__ Partial partial;
    __shared__ A total[WIDE];
    wait_for_previous_launch();
    allow_next_launch();

    int operand = 0;
    while (operand + 1 < args.count && blockIdx.x >= args.operand[operand + 1].first) ++operand;
    const Operand& o = args.operand[operand];
    sum_columns(o, blockIdx.x - o.first, partial, total);
}
