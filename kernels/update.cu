// Update: one AdaFisher step of all parameters in one launch. For element i = r * columns + c of a parameter:
//
//     F = S[r] * H[c] + Lambda                          (1 for a parameter without factors)
//     g = grad_scale * g + l2 * p
//     m = beta * m + (1 - beta) * g
//     p = p - (step_size * m / F + decay * p)           step_size = lr / (1 - beta^step)
//
// AdaFisher has l2 = weight_decay, decay = 0; AdaFisherW has l2 = 0, decay = lr * weight_decay. F lives in registers.
// A beta, l2 or decay of 0 leaves its term out, as torch.optim does: 0 times inf would be NaN.
//
// Bytes: reads p, g, m, writes p, m: 20 an element in float32, as momentum SGD (Adam: 28). H and S are short and
// cached. Each block updates one chunk of one parameter; what lies where is told by a table on the device that seldom
// changes. What changes with every step (scalars, addresses of gradients) is passed by value as long as it fits.

#include "common.cuh"

#ifndef CHUNK
#define CHUNK 4096  // elements of a block; small enough to balance small models, large enough to hide the table look-up
#endif

struct Parameter {
    T* p;         // (size), in/out
    A* m;         // (size), in/out
    const A* H;   // (columns), in; 0: no factors
    const A* S;   // (size / columns), in
    i64 size;
    i64 columns;
    int channels; // > 0: memory holds (row, tap, channel) while H is ordered (channel, tap): channels_last weights
    int taps;     //
    int hyper;    // index of this parameter's scalars
    int vector;   // 1: p and m allow accesses of four elements
};

struct Hyper {
    A step_size, decay, l2, beta, rest, Lambda, grad_scale;  // rest = 1 - beta, rounded once on the host
    int unused;
};

constexpr int WORDS = 504;  // fits the 4 KiB of arguments that every device takes

struct Update {
    const Parameter* parameters;
    const Share* shares;        // one for each block
    const Hyper* hypers;        // 0: they are the first of `words`
    const T* const* gradients;  // one for each parameter, 0: none, leave it alone; 0: they are the last of `words`
    u64 words[WORDS];
};

// Scalars of a group of parameters, for counters that live on the device.
struct Rate {
    double lr, beta, Lambda, l2, decay, grad_scale;  // decay: of AdaFisherW, in units of lr
    const float* lr_at;                              // 0, or where lr lies
};

constexpr int FLAGS = 480;  // fits the arguments as well

struct Schedule {
    const Rate* rates;
    const int* groups;  // (count): each parameter's rate
    i64* steps;         // (count), in/out
    Hyper* hypers;      // (count), out
    i64 first;          // parameters of this launch
    i64 count;
    i64 by;             // 1; -1: count back
    u64 present[FLAGS]; // a bit for each: it has a gradient
};

static_assert(sizeof(Rate) == SIZEOF_Rate, "kernels and cafin_cupy/table.py disagree on Rate");
static_assert(sizeof(Schedule) == SIZEOF_Schedule, "kernels and cafin_cupy/table.py disagree on Schedule");
static_assert(sizeof(Parameter) == SIZEOF_Parameter, "kernels and cafin_cupy/table.py disagree on Parameter");
static_assert(sizeof(Update) == SIZEOF_Update, "kernels and cafin_cupy/table.py disagree on Update");

constexpr int THREADS = 256;

__device__ inline void advance(T& p, T g, A& m, A F, const Hyper& h) {
    const A x = A(p);
    A slope = h.grad_scale * A(g);
    if (h.l2 != A(0)) slope += h.l2 * x;
    const A past = m;
    m = h.rest * slope;
    if (h.beta != A(0)) m += h.beta * past;
    A step = h.step_size * m / F;
    if (h.decay != A(0)) step += h.decay * x;
    p = T(x - step);
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

__device__ inline const T* gradient(const Update& args, int parameter) {
    return args.gradients ? args.gradients[parameter] : reinterpret_cast<const T*>(args.words[WORDS - 1 - parameter]);
}

__device__ inline Hyper hyper(const Update& args, int index) {
    if (args.hypers) return args.hypers[index];
    constexpr int LENGTH = sizeof(Hyper) / sizeof(u64);
    union {
        u64 words[LENGTH];
        Hyper h;
    } read;
    for (int k = 0; k < LENGTH; ++k) read.words[k] = args.words[index * LENGTH + k];
    return read.h;
}

extern "C" __global__ void __launch_bounds__(THREADS) update(const Update args) {
    wait_for_previous_launch();
    allow_next_launch();
    const Share share = args.shares[blockIdx.x];
    const T* whole = gradient(args, share.item);
    if (whole == nullptr) return;
    const Parameter t = args.parameters[share.item];
    const Hyper h = hyper(args, t.hyper);
    const bool aligned = t.vector && reinterpret_cast<u64>(whole) % alignof(Pack<T>) == 0;
    const i64 start = i64(share.number) * CHUNK;
    const int count = int(min(i64(CHUNK), t.size - start));
    const i64 first_row = t.H ? start / t.columns : 0;
    const i64 first_column = t.H ? start - first_row * t.columns : 0;
    T* p = t.p + start;
    const T* g = whole + start;
    A* m = t.m + start;

    for (int k = 4 * threadIdx.x; k < count; k += 4 * THREADS) {
        const bool vector = aligned && k + 4 <= count;
        const int n = min(4, count - k);
        Pack<T> pk, gk;
        Pack<A> mk;
        if (vector) {
            pk = *reinterpret_cast<const Pack<T>*>(p + k);
            gk = *reinterpret_cast<const Pack<T>*>(g + k);
            mk = *reinterpret_cast<const Pack<A>*>(m + k);
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
            *reinterpret_cast<Pack<T>*>(p + k) = pk;
            *reinterpret_cast<Pack<A>*>(m + k) = mk;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < n) p[k + e] = pk.at[e], m[k + e] = mk.at[e];
            }
        }
    }
}

// Ahead of an update in a CUDA graph: counts the step of each parameter that has a gradient, and sets its scalars.
extern "C" __global__ void __launch_bounds__(THREADS) schedule(const Schedule args) {
    wait_for_previous_launch();
    allow_next_launch();
    const int place = blockIdx.x * THREADS + threadIdx.x;
    const i64 k = args.first + place;
    if (place >= 64 * FLAGS || k >= args.count || !(args.present[place / 64] >> (place % 64) & 1)) return;
    const Rate r = args.rates[args.groups[k]];
    const double lr = r.lr_at ? double(*r.lr_at) : r.lr;
    const i64 step = args.steps[k] += args.by;
    args.hypers[k] = {A(lr / (1.0 - pow(r.beta, double(step)))), A(lr * r.decay),  A(r.l2), A(r.beta), A(1.0 - r.beta),
                      A(r.Lambda), A(1.0 / r.grad_scale), 0};
}
