// Column sums: out[j] = scale * sum over rows r and over q < run of x[r, j * run + q] ** power.
//
// Every raw moment of the Fisher information starts with this one streaming read of a layer's input or output gradient:
// Linear and LayerNorm sum plain columns (run 1), norm layers and a convolution's output gradient sum the pixels of a
// channel as well (run = pixels), and a convolution's input keeps its pixels (run 1), which fold.cuh sorts into taps.
// One launch serves both arrays of a layer, or of several layers: a small one alone cannot fill the device.
//
// The arrays may be of 16-bit floats: they are read as they lie and added in A.
//
// A block reads a slice of the rows over a tile of columns: a warp a row, a thread 16 bytes of it, so a tile has 128
// columns of floats, or 256 of 16-bit floats, and WIDE columns where rows are few, so that a block has enough to read.
// Bytes: each element once; the results are smaller by the number of rows.
// Rows need not start at multiples of 16 bytes: a warp's rows are WARPS apart, so all start at one place between two
// such multiples, and the warp shifts its window to the one before. A tile then has fewer columns by one thread's
// share, so that the window still holds it.
//
// Order of summation: fixed by shape, type and alignment. A thread adds its rows in order, the warps are added in
// order, the lanes of a run by a butterfly, and fold.cuh adds slices and tiles in order. No atomics.

struct Operand {
    const void* x;     // (rows, columns), in; columns contiguous
    A* sums;           // (slices, parts, segments), in/out
    i64 rows;
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
    int wide;          // 1: a block reads WIDE columns
    int length;        // columns of a tile: what a block reads, less a thread's share if rows are not aligned
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

constexpr int WIDE = 512;

// Columns of a warp's access.
template <typename E>
constexpr int TILE = WARP * NEIGHBOURS<E>;

static_assert(WARPS * sizeof(Half) % alignof(Pack<Half>) == 0, "all rows of a warp have one alignment");

// Neighbouring elements of a row in one access, or one by one: those whose bits in `inside` are set, 0 for the others.
template <bool VECTOR, typename E>
__device__ inline Pack<E> load(const E* row, unsigned inside) {
    if constexpr (VECTOR) {
        return *reinterpret_cast<const Pack<E>*>(row);
    } else {
        Pack<E> x = {};
        for (int k = 0; k < NEIGHBOURS<E>; ++k)
            if (inside >> k & 1) x.at[k] = row[k];
        return x;
    }
}

template <typename E>
__device__ inline A term(E x, bool square) {
    const A a = value(x);
    return square ? a * a : a;
}

// What a thread adds of each of its rows: SPAN packs of neighbouring columns.
template <typename E, int SPAN>
struct Columns {
    const E* x;       // the first pack, in the present row
    i64 step;         // elements between two rows
    unsigned inside;  // a bit for each column of the packs: it lies in the matrix
    bool square;
    Pack<A> sum[SPAN][NEIGHBOURS<E> / NEIGHBOURS<A>];

    template <int COUNT, bool VECTOR>
    __device__ void add_rows() {
        Pack<E> packs[COUNT][SPAN];
#pragma unroll
        for (int u = 0; u < COUNT; ++u)
            for (int j = 0; j < SPAN; ++j)
                packs[u][j] = load<VECTOR>(x + u * step + j * TILE<E>, inside >> j * NEIGHBOURS<E>);
#pragma unroll
        for (int u = 0; u < COUNT; ++u)
            for (int j = 0; j < SPAN; ++j)
                for (int k = 0; k < NEIGHBOURS<E>; ++k)
                    sum[j][k / NEIGHBOURS<A>].at[k % NEIGHBOURS<A>] += term(packs[u][j].at[k], square);
        x += COUNT * step;
    }

    template <int COUNT, bool VECTOR>
    __device__ void add(int rows) {
        for (; rows >= COUNT; rows -= COUNT) add_rows<COUNT, VECTOR>();
        for (; rows > 0; --rows) add_rows<1, VECTOR>();
    }
};

// What the warps of a block have found of its columns.
struct Partial {
    Pack<A> sums[WARPS][WIDE / NEIGHBOURS<A>];
    int shift[WARPS];  // of each warp's window

    __device__ A at(int warp, int column) const {
        return reinterpret_cast<const A*>(sums[warp])[column + shift[warp]];
    }
};

// Sums of a block's columns over its rows, by warp.
template <typename E, int SPAN>
__device__ inline void sum_tile(const Operand& o, int tile, int slice, Partial& partial) {
    constexpr int N = NEIGHBOURS<E>, PACKS = N / NEIGHBOURS<A>;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 row = slice * o.slice + warp;
    const int rows = int((min(o.rows, (slice + 1) * o.slice) - row + WARPS - 1) / WARPS);  // of this warp
    const i64 begin = i64(tile) * o.length;
    const E* start = static_cast<const E*>(o.x) + row * o.stride + begin;
    const int shift = int(reinterpret_cast<u64>(start) / sizeof(E) % N);
    if (lane == 0) partial.shift[warp] = shift;  // now: it need not stay in a register
    const i64 first = begin + lane * N - shift;  // column

    Columns<E, SPAN> c = {};
    c.x = start - begin + first;
    c.step = WARPS * o.stride;
    for (int j = 0; j < SPAN; ++j)
        for (int k = 0; k < N; ++k) {
            const i64 column = first + j * TILE<E> + k;  // those before the tile's are read in vain
            if (column >= 0 && column < o.columns) c.inside |= 1u << (j * N + k);
        }
    c.square = o.square;
    if (c.inside == (1u << SPAN * N) - 1) c.template add<IN_FLIGHT / SPAN, true>(rows);
    else if (c.inside) c.template add<(SPAN == 1 ? 4 : 1), false>(rows);  // at a border
    for (int j = 0; j < SPAN; ++j)
        for (int q = 0; q < PACKS; ++q) partial.sums[warp][(j * WARP + lane) * PACKS + q] = c.sum[j][q];
}

template <typename E>
__device__ inline void sum_block(const Operand& o, int tile, int slice, Partial& partial) {
    if (o.wide) sum_tile<E, WIDE / TILE<E>>(o, tile, slice, partial);
    else sum_tile<E, 1>(o, tile, slice, partial);
}

__device__ inline void put(const Operand& o, i64 index, A sum) {
    sum *= o.scale;
    o.sums[index] = o.add ? o.sums[index] + sum : sum;
}

// A block's share of an operand.
__device__ inline void sum_columns(const Operand& o, int block, Partial& partial, A* total) {
    const int tile = block % o.tiles;
    const int slice = block / o.tiles;
    if (o.element == 0) sum_block<T>(o, tile, slice, partial);
    else if (o.element == 1) sum_block<Bfloat16>(o, tile, slice, partial);
    else sum_block<Half>(o, tile, slice, partial);
    const int length = o.length;
    const i64 begin = i64(tile) * length;
    __syncthreads();

    for (int column = threadIdx.x; column < length; column += THREADS) {
        A t = 0;
        for (int w = 0; w < WARPS; ++w) t += partial.at(w, column);
        if (o.run > 1) total[column] = t;
        else if (begin + column < o.columns) put(o, slice * o.columns + begin + column, t);
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
