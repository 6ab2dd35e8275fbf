// Update: one AdaFisher step of all parameters in one launch. For element i = r * columns + c of a parameter:
//
//     F = S[r] * H[c] + Lambda                          (1 for a parameter without factors)
//     g = grad_scale * g + l2 * p
//     m = beta * m + (1 - beta) * g
//     p = p - (step_size * m / F + decay * p)           step_size = lr / (1 - beta^step)
//
// AdaFisher has l2 = weight_decay, decay = 0; AdaFisherW has l2 = 0, decay = lr * weight_decay. F lives in registers.
//
// Bytes: reads p, g, m, writes p, m: 20 an element in float32, as momentum SGD (Adam: 28). H and S are short and cached.
// Each block updates one chunk of one parameter; what lies where is told by a table on the device that changes only
// when a pointer does. Scalars that change with every step are passed by value.

#include "common.cuh"

#ifndef CHUNK
#define CHUNK 4096  // elements of a block; small enough to balance small models, large enough to hide the table look-up
#endif

struct Parameter {
    T* p;         // (size), in/out
    const T* g;   // (size), in; 0: no gradient, leave this parameter alone
    A* m;         // (size), in/out
    const A* H;   // (columns), in; 0: no factors
    const A* S;   // (size / columns), in
    i64 size;
    i64 columns;
    int channels; // > 0: memory holds (row, tap, channel) while H is ordered (channel, tap): channels_last weights
    int taps;     //
    int hyper;    // index of this parameter's scalars
    int vector;   // 1: p, g and m allow accesses of four elements
};

struct Hyper {
    A step_size, decay, l2, beta, rest, Lambda, grad_scale;  // rest = 1 - beta, rounded once on the host
    int unused;
};

constexpr int HYPERS = 120;  // fits the 4 KiB of arguments that every device takes

struct Chunk {
    int parameter;
    int number;  // the chunk's place within its parameter
};

struct Update {
    const Parameter* parameters;
    const Chunk* chunks;      // one for each block
    Hyper hypers[HYPERS];
};

static_assert(sizeof(Parameter) == SIZEOF_Parameter, "kernels and cafin_cupy/table.py disagree on Parameter");
static_assert(sizeof(Update) == SIZEOF_Update, "kernels and cafin_cupy/table.py disagree on Update");

constexpr int THREADS = 256;

__device__ inline void advance(T& p, T g, A& m, A F, const Hyper& h) {
    const A x = A(p);
    m = h.beta * m + h.rest * (h.grad_scale * A(g) + h.l2 * x);
    p = T(x - (h.step_size * (m / F) + h.decay * x));
}

// Walks over the columns of a matrix, row by row.
struct Place {
    const A* H;
    const A* S;
    unsigned columns, column, channels, taps;
    i64 row;

    __device__ A denominator(A Lambda) const {
        const unsigned c = channels ? column % channels * taps + column / channels : column;
        return S[row] * H[c] + Lambda;
    }
    __device__ void next() {
        if (++column == columns) {
            column = 0;
            ++row;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) update(const Update args) {
    const Chunk chunk = args.chunks[blockIdx.x];
    const Parameter t = args.parameters[chunk.parameter];
    if (t.g == nullptr) return;
    const Hyper h = args.hypers[t.hyper];
    const i64 start = i64(chunk.number) * CHUNK;
    const int count = int(min(i64(CHUNK), t.size - start));
    const i64 first_row = t.H ? start / t.columns : 0;
    const i64 first_column = t.H ? start - first_row * t.columns : 0;
    T* p = t.p + start;
    const T* g = t.g + start;
    A* m = t.m + start;

    for (int k = 4 * threadIdx.x; k < count; k += 4 * THREADS) {
        const bool vector = t.vector && k + 4 <= count;
        const int n = min(4, count - k);
        Four<T> pk, gk;
        Four<A> mk;
        if (vector) {
            pk = *reinterpret_cast<const Four<T>*>(p + k);
            gk = *reinterpret_cast<const Four<T>*>(g + k);
            mk = *reinterpret_cast<const Four<A>*>(m + k);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < n) pk.at[e] = p[k + e], gk.at[e] = g[k + e], mk.at[e] = m[k + e];
            }
        }
        Place at = {t.H, t.S, unsigned(t.columns), 0, unsigned(t.channels), unsigned(t.taps), 0};
        if (t.H) {
            const u64 column = first_column + k;  // fewer than 2^32 columns: the table refuses more
            at.row = first_row + (column >> 32 ? i64(column / at.columns) : i64(unsigned(column) / at.columns));
            at.column = unsigned(column - u64(at.row - first_row) * at.columns);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (e < n) {
                const A F = t.H ? at.denominator(h.Lambda) : A(1);
                advance(pk.at[e], gk.at[e], mk.at[e], F, h);
                at.next();
            }
        }
        if (vector) {
            *reinterpret_cast<Four<T>*>(p + k) = pk;
            *reinterpret_cast<Four<A>*>(m + k) = mk;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < n) p[k + e] = pk.at[e], m[k + e] = mk.at[e];
            }
        }
    }
}
