// Column sums: out[j] = scale * sum over rows r and over q < run of x[r, j * run + q] ** power.
//
// Every raw moment of the Fisher information starts with this one streaming read of a layer's input or output gradient:
// Linear and LayerNorm sum plain columns (run 1), norm layers and a convolution's output gradient sum the pixels of a
// channel as well (run = pixels), and a convolution's input keeps its pixels (run 1), which fold.cu sorts into taps.
// Both arrays of a layer are served by one launch.
//
// A block reads a slice of the rows over TILE columns: a warp a row, a lane four neighbouring columns. Bytes: each
// element once; the results are smaller by the number of rows.
//
// Order of summation: fixed by the shape alone. A thread adds its rows in order, the warps are added in order, the
// lanes of a run by a butterfly, and fold.cu adds slices and tiles in order. No atomics.

#include "common.cuh"

struct Operand {
    const T* x;        // (rows, columns), in; columns contiguous
    A* sums;           // (slices, parts, segments), in/out
    i64 rows;          //
    i64 stride;        // elements between rows
    i64 columns;       // segments * run
    i64 run;           // neighbouring columns that share a result
    i64 slice;         // rows of one block
    int tiles;         // blocks side by side
    int slices;        // blocks one below the other
    int parts;         // most tiles that a run can touch; 1 where run is 1
    int square;        // 1: sum of squares, 0: plain sum
    int add;           // 1: add to `sums`, 0: overwrite
    int vector;        // 1: x and stride allow accesses of four elements
    A scale;           //
    int unused;        // keeps the size a multiple of 8 for both types of A
};

struct ColumnSums {
    Operand operand[2];  // a layer's input and its output gradient; tiles * slices blocks each
};

static_assert(sizeof(ColumnSums) == SIZEOF_ColumnSums, "kernels and cafin_cupy/table.py disagree on ColumnSums");

constexpr int WARPS = 8;
constexpr int UNROLL = 8;  // rows in flight per thread

__device__ inline A term(T x, bool square) {
    const A a = A(x);
    return square ? a * a : a;
}

// Four neighbouring elements of a row in one access, or one by one; those behind the last column count as 0.
template <bool VECTOR>
__device__ inline Four<T> load(const T* row, i64 column, i64 columns) {
    if constexpr (VECTOR) {
        return *reinterpret_cast<const Four<T>*>(row + column);
    } else {
        Four<T> x;
        for (int k = 0; k < 4; ++k) x.at[k] = column + k < columns ? row[column + k] : T(0);
        return x;
    }
}

// Sums of four neighbouring columns over every WARPS-th row from `row` on.
template <bool VECTOR>
__device__ inline Four<A> sum_rows(const Operand& o, i64 row, i64 end, i64 column) {
    const bool square = o.square;
    const i64 step = WARPS * o.stride;
    const T* x = o.x + row * o.stride;
    Four<A> sum = {};
    for (; row + (UNROLL - 1) * WARPS < end; row += UNROLL * WARPS, x += UNROLL * step) {
        Four<T> rows[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) rows[u] = load<VECTOR>(x + u * step, column, o.columns);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            for (int k = 0; k < 4; ++k) sum.at[k] += term(rows[u].at[k], square);
    }
    for (; row < end; row += WARPS, x += step) {
        const Four<T> last = load<VECTOR>(x, column, o.columns);
        for (int k = 0; k < 4; ++k) sum.at[k] += term(last.at[k], square);
    }
    return sum;
}

__device__ inline void put(const Operand& o, i64 index, A sum) {
    sum *= o.scale;
    o.sums[index] = o.add ? o.sums[index] + sum : sum;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP) column_sums(const ColumnSums args) {
    __shared__ Four<A> partial[WARPS][WARP];
    __shared__ A total[TILE];

    const int first = args.operand[0].tiles * args.operand[0].slices;
    const bool second = blockIdx.x >= first;
    const Operand& o = args.operand[second];
    const int block = blockIdx.x - (second ? first : 0);
    const int tile = block % o.tiles;
    const int slice = block / o.tiles;
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const i64 column = i64(tile) * TILE + 4 * lane;
    const i64 end = min(o.rows, (slice + 1) * o.slice);
    const i64 row = slice * o.slice + warp;
    const bool vector = o.vector && column + 4 <= o.columns;
    partial[warp][lane] = vector ? sum_rows<true>(o, row, end, column) : sum_rows<false>(o, row, end, column);
    __syncthreads();

    if (threadIdx.x < TILE) {
        A t = 0;
        for (int w = 0; w < WARPS; ++w) t += partial[w][threadIdx.x / 4].at[threadIdx.x % 4];
        const i64 here = i64(tile) * TILE + threadIdx.x;
        if (o.run == 1) {
            if (here < o.columns) put(o, slice * o.columns + here, t);
        } else {
            total[threadIdx.x] = t;
        }
    }
    if (o.run == 1) return;
    __syncthreads();

    // A warp a segment: the part of each run that lies in this tile.
    const i64 begin = i64(tile) * TILE;
    const i64 stop = min(begin + TILE, o.columns);
    const i64 segments = o.columns / o.run;
    for (i64 segment = begin / o.run + warp; segment * o.run < stop; segment += WARPS) {
        const i64 from = max(begin, segment * o.run), to = min(stop, (segment + 1) * o.run);
        A t = 0;
        for (i64 c = from + lane; c < to; c += WARP) t += total[c - begin];
        t = warp_sum(t);
        const i64 part = tile - segment * o.run / TILE;
        if (lane == 0) put(o, (slice * o.parts + part) * segments + segment, t);
    }
}
