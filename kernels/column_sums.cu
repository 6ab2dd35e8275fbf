// Column sums: out[j] = scale * sum over rows r and over q < run of x[r, j * run + q] ** power.
//
// Every raw moment of the Fisher information starts with this one streaming read of a layer's input or output gradient:
// Linear and LayerNorm sum plain columns (run 1), norm layers and a convolution's output gradient sum the pixels of a
// channel as well (run = pixels), and a convolution's input keeps its pixels (run 1), which fold.cu sorts into taps.
// One launch serves both arrays of a layer, or of several layers: a small one alone cannot fill the device.
//
// The arrays may be of 16-bit floats: they are read as they lie and added in A.
//
// A block reads a slice of the rows over a tile of columns: a warp a row, a thread 16 bytes of it, so a tile has 128
// columns of floats, or 256 of 16-bit floats. Bytes: each element once; the results are smaller by the number of rows.
//
// Order of summation: fixed by shape and type alone. A thread adds its rows in order, the warps are added in order, the lanes of a run by a butterfly, and fold.cu adds slices and tiles in order. No atomics.

#include "common.cuh"

struct Operand {
    const void* x;     // (rows, columns), in; columns contiguous
    A* sums;           // (slices, parts, segments), in/out
    i64 rows;          //
    i64 stride;        // elements between rows
    i64 columns;       // segments * run
    i64 run;           // neighbouring columns that share a result
    i64 slice;         // rows of one block
    int first;         // its first block
    int tiles;         // blocks side by side
    int slices;        // blocks one below the other
    int parts;         // most tiles that a run can touch; 1 where run is 1
    int square;        // 1: sum of squares, 0: plain sum
    int add;           // 1: add to `sums`, 0: overwrite
    int element;       // type of x: 0: T, 1: bfloat16, 2: half
    int vector;        // 1: x and stride allow accesses of 16 bytes
    A scale;           //
    int unused;        // keeps the size a multiple of 8
};

constexpr int OPERANDS = 32;  // fits the 4 KiB of arguments that every device takes

struct ColumnSums {
    Operand operand[OPERANDS];  // inputs and output gradients; tiles * slices blocks each
    int count;
    int unused;
};

static_assert(sizeof(ColumnSums) == SIZEOF_ColumnSums, "kernels and cafin_cupy/table.py disagree on ColumnSums");

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int UNROLL = 8;  // rows in flight per thread

// Columns of a block.
template <typename E>
constexpr int TILE = WARP * NEIGHBOURS<E>;

// Neighbouring elements of a row in one access, or one by one; those behind the last column count as 0.
template <bool VECTOR, typename E>
__device__ inline Pack<E> load(const E* row, i64 columns) {
    if constexpr (VECTOR) {
        return *reinterpret_cast<const Pack<E>*>(row);
    } else {
        Pack<E> x = {};
        for (int k = 0; k < NEIGHBOURS<E>; ++k)
            if (k < columns) x.at[k] = row[k];
        return x;
    }
}

// Adds COUNT rows, `step` elements apart, to the sums of neighbouring columns.
template <int COUNT, bool VECTOR, typename E>
__device__ inline void add_rows(A* sum, const E* x, i64 step, i64 columns, bool square) {
    Pack<E> rows[COUNT];
#pragma unroll
    for (int u = 0; u < COUNT; ++u) rows[u] = load<VECTOR>(x + u * step, columns);
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
        for (int k = 0; k < NEIGHBOURS<E>; ++k) {
            const A a = value(rows[u].at[k]);
            sum[k] += square ? a * a : a;
        }
}

// Sums of neighbouring columns over every WARPS-th row from `row` on.
template <bool VECTOR, typename E>
__device__ inline void sum_rows(const Operand& o, i64 row, i64 end, i64 column, A* sum) {
    const i64 step = WARPS * o.stride, left = o.columns - column;
    const E* x = static_cast<const E*>(o.x) + row * o.stride + column;
    if (left <= 0) return;
    for (; row + (UNROLL - 1) * WARPS < end; row += UNROLL * WARPS, x += UNROLL * step)
        add_rows<UNROLL, VECTOR>(sum, x, step, left, o.square);
    for (; row + (UNROLL / 2 - 1) * WARPS < end; row += UNROLL / 2 * WARPS, x += UNROLL / 2 * step)
        add_rows<UNROLL / 2, VECTOR>(sum, x, step, left, o.square);
    for (; row < end; row += WARPS, x += step) add_rows<1, VECTOR>(sum, x, step, left, o.square);
}

// Sums of the columns of a tile over the rows of a slice, by warp: partial[warp * tile + column]. Returns the tile's length.
template <typename E>
__device__ inline int sum_tile(const Operand& o, int tile, int slice, A* partial) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 column = i64(tile) * TILE<E> + lane * NEIGHBOURS<E>;
    const i64 row = slice * o.slice + warp;
    const i64 end = min(o.rows, (slice + 1) * o.slice);
    A sum[NEIGHBOURS<E>] = {};
    if (o.vector && column + NEIGHBOURS<E> <= o.columns) sum_rows<true, E>(o, row, end, column, sum);
    else sum_rows<false, E>(o, row, end, column, sum);
    for (int k = 0; k < NEIGHBOURS<E>; ++k) partial[warp * TILE<E> + lane * NEIGHBOURS<E> + k] = sum[k];
    return TILE<E>;
}

__device__ inline void put(const Operand& o, i64 index, A sum) {
    sum *= o.scale;
    o.sums[index] = o.add ? o.sums[index] + sum : sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) column_sums(const ColumnSums args) {
    __shared__ A partial[WARPS * TILE<Half>];
    __shared__ A total[TILE<Half>];
    wait_for_previous_launch();
    allow_next_launch();

    int operand = 0;
    while (operand + 1 < args.count && blockIdx.x >= args.operand[operand + 1].first) ++operand;
    const Operand& o = args.operand[operand];
    const int block = blockIdx.x - o.first;
    const int tile = block % o.tiles;
    const int slice = block / o.tiles;
    const int length = o.element == 0   ? sum_tile<T>(o, tile, slice, partial)
                       : o.element == 1 ? sum_tile<Bfloat16>(o, tile, slice, partial)
                                        : sum_tile<Half>(o, tile, slice, partial);
    const i64 begin = i64(tile) * length;
    __syncthreads();

    if (threadIdx.x < length) {
        A t = 0;
        for (int w = 0; w < WARPS; ++w) t += partial[w * length + threadIdx.x];
        const i64 here = begin + threadIdx.x;
        if (o.run == 1) {
            if (here < o.columns) put(o, slice * o.columns + here, t);
        } else {
            total[threadIdx.x] = t;
        }
    }
    if (o.run == 1) return;
    __syncthreads();

    // A warp a segment: the part of each run that lies in this tile.
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 stop = min(begin + length, o.columns);
    const i64 segments = o.columns / o.run;
    for (i64 segment = begin / o.run + warp; segment * o.run < stop; segment += WARPS) {
        const i64 from = max(begin, segment * o.run), to = min(stop, (segment + 1) * o.run);
        A t = 0;
        for (i64 c = from + lane; c < to; c += WARP) t += total[c - begin];
        t = warp_sum(t);
        const i64 part = tile - segment * o.run / length;
        if (lane == 0) put(o, (slice * o.parts + part) * segments + segment, t);
    }
}
