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
// Rows need not start at multiples of 16 bytes: a warp's rows are WARPS apart, so all start at one place between two such
// multiples, and the warp shifts its window to the one before; the last columns of its tile are then read one by one.
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
    A scale;           //
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
constexpr int IN_FLIGHT = 8;  // rows per thread

// Columns of a block.
template <typename E>
constexpr int TILE = WARP * NEIGHBOURS<E>;

static_assert(WARPS * sizeof(Half) % alignof(Pack<Half>) == 0, "all rows of a warp have one alignment");

// Neighbouring elements of a row in one access, or one by one: those of columns in [low, high), 0 for the others.
template <bool VECTOR, typename E>
__device__ inline Pack<E> load(const E* row, i64 low, i64 high) {
    if constexpr (VECTOR) {
        return *reinterpret_cast<const Pack<E>*>(row);
    } else {
        Pack<E> x = {};
        for (int k = 0; k < NEIGHBOURS<E>; ++k)
            if (low <= k && k < high) x.at[k] = row[k];
        return x;
    }
}

template <typename E>
__device__ inline A term(E x, bool square) {
    const A a = value(x);
    return square ? a * a : a;
}

// What a thread adds of each of its rows: neighbouring columns, and with SHIFTED perhaps one more.
template <typename E>
struct Columns {
    const E* x;           // the first of the neighbours, in the present row
    const E* more;        // the other one; 0: none
    i64 step;             // elements between two rows
    i64 low, high;        // neighbours inside the matrix
    bool square;
    A sum[NEIGHBOURS<E>];
    A sum_more;

    template <int COUNT, bool VECTOR, bool SHIFTED>
    __device__ void add_rows() {
        Pack<E> rows[COUNT];
        E others[COUNT] = {};
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            rows[u] = load<VECTOR>(x + u * step, low, high);
            if (SHIFTED && more) others[u] = more[u * step];
        }
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            for (int k = 0; k < NEIGHBOURS<E>; ++k) sum[k] += term(rows[u].at[k], square);
            if (SHIFTED) sum_more += term(others[u], square);
        }
        x += COUNT * step;
        if (SHIFTED && more) more += COUNT * step;
    }

    template <int COUNT, bool VECTOR, bool SHIFTED>
    __device__ void add(i64 row, i64 end) {
        for (; row + (COUNT - 1) * WARPS < end; row += COUNT * WARPS) add_rows<COUNT, VECTOR, SHIFTED>();
        for (; row < end; row += WARPS) add_rows<1, VECTOR, SHIFTED>();
    }
};

// Sums of the columns of a tile over the rows of a slice, by warp: partial[warp * tile + column]. Returns the tile's length.
template <typename E>
__device__ inline int sum_tile(const Operand& o, int tile, int slice, A* partial) {
    constexpr int N = NEIGHBOURS<E>, LENGTH = TILE<E>;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 row = slice * o.slice + warp;
    const i64 end = min(o.rows, (slice + 1) * o.slice);
    const i64 left = o.columns - i64(tile) * LENGTH;  // columns from the tile's first to the matrix's last
    const E* start = static_cast<const E*>(o.x) + row * o.stride + i64(tile) * LENGTH;
    const int shift = int(reinterpret_cast<u64>(start) / sizeof(E) % N);
    const int first = lane * N - shift, other = LENGTH - shift + lane;  // columns, counted from the tile's first

    Columns<E> c = {};
    c.x = start + first;
    c.more = lane < shift && other < left ? start + other : nullptr;
    c.step = WARPS * o.stride;
    c.low = -first, c.high = left - first;
    c.square = o.square;
    const bool whole = i64(tile) * LENGTH + first >= 0 && c.high >= N;  // columns before the tile are read in vain
    if (whole && shift == 0) c.template add<IN_FLIGHT, true, false>(row, end);
    else if (whole) c.template add<IN_FLIGHT, true, true>(row, end);
    else if (c.high > 0) c.template add<2, false, true>(row, end);  // at a border
    for (int k = 0; k < N; ++k)
        if (first + k >= 0) partial[warp * LENGTH + first + k] = c.sum[k];
    if (lane < shift) partial[warp * LENGTH + other] = c.sum_more;
    return LENGTH;
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
