// One AdaFisher step of all parameters in one launch, for update.cu and update_mixed.cu. For element
// i = r * columns + c of a parameter:
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

#ifndef CHUNK
#define CHUNK 4096  // elements of a block; small enough to balance small models, large enough to hide the table look-up
#endif

struct Parameter {
    void* p;        // (size), in/out
    void* m;        // (size), in/out
    float* master;  // (size), in/out: float32 weights that p is a rounded copy of; 0: p is all there is
    const A* H;     // (columns), in; 0: no factors
    const A* S;     // (size / columns), in
    i64 size;
    i64 columns;
    int channels;   // > 0: memory holds (row, tap, channel) while H is ordered (channel, tap): channels_last weights
    int taps;       //
    int hyper;      // index of this parameter's scalars
    int vector;     // 1: p, m and master allow accesses of four elements
    int kind;       // types of p and its gradient, and of m, and whether there is a master, see update_mixed.cu
    int key;        // what tells this parameter's random numbers from those of others
};

struct Hyper {
    A step_size, decay, l2, beta, rest, Lambda;  // rest = 1 - beta, rounded once on the host
    A grad_scale;    // 0: a scaler has found inf or NaN in some gradient, leave the parameter alone
    unsigned noise;  // 0: p is rounded to the nearest; else, if it is of 16 bits, at random by this number
};

constexpr int WORDS = 504;  // fits the 4 KiB of arguments that every device takes

struct Update {
    const Parameter* parameters;
    const Share* shares;           // one for each block
    const Hyper* hypers;           // 0: they are the first of `words`
    const void* const* gradients;  // one for each parameter, 0: none, leave it alone; 0: they are the last of `words`
    u64 words[WORDS];
};

static_assert(sizeof(Parameter) == SIZEOF_Parameter, "kernels and cafin_cupy/table.py disagree on Parameter");
static_assert(sizeof(Update) == SIZEOF_Update, "kernels and cafin_cupy/table.py disagree on Update");

constexpr int THREADS = 256;

enum Type { FLOAT32, BFLOAT16, HALF };

// As cafin_cupy/cuda_update.py numbers them.
constexpr int kind(Type p, Type m, bool master = false) { return p | m << 2 | master << 4; }

template <typename E>
struct alignas(4 * sizeof(E)) Quad {
    E at[4];
};

__device__ inline void advance(A& p, A g, A& m, A F, const Hyper& h) {
    const A x = p;
    A slope = h.grad_scale * g;
    if (h.l2 != A(0)) slope += h.l2 * x;
    const A past = m;
    m = h.rest * slope;
    if (h.beta != A(0)) m += h.beta * past;
    A step = h.step_size * m / F;
    if (h.decay != A(0)) step += h.decay * x;
    p = x - step;
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

__device__ inline const void* gradient(const Update& args, int parameter) {
    return args.gradients ? args.gradients[parameter]
                          : reinterpret_cast<const void*>(args.words[WORDS - 1 - parameter]);
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

// One chunk of a parameter of type P with momentum of type M. Arithmetic is that of A; what is of 16 bits is rounded once,
// when it is written. MASTER: p is a rounded copy of float32 weights. RANDOM: p may be rounded at random.
template <typename P, typename M, bool MASTER = false, bool RANDOM = false>
__device__ inline void update_chunk(const Hyper& h, int chunk, const void* gradients, const Parameter& t) {
    if (h.grad_scale == A(0)) return;
    const bool aligned = t.vector && reinterpret_cast<u64>(gradients) % alignof(Quad<P>) == 0;
    const i64 start = i64(chunk) * CHUNK;
    const int count = int(min(i64(CHUNK), t.size - start));
    const i64 first_row = t.H ? start / t.columns : 0;
    const i64 first_column = t.H ? start - first_row * t.columns : 0;
    P* p = static_cast<P*>(t.p) + start;
    const P* g = static_cast<const P*>(gradients) + start;
    M* m = static_cast<M*>(t.m) + start;
    float* master = MASTER ? t.master + start : nullptr;

    for (int k = 4 * threadIdx.x; k < count; k += 4 * THREADS) {
        const bool vector = aligned && k + 4 <= count;
        const int n = min(4, count - k);
        Quad<P> pk, gk;
        Quad<M> mk;
        Quad<float> wk;
        if (vector) {
            pk = *reinterpret_cast<const Quad<P>*>(p + k);
            gk = *reinterpret_cast<const Quad<P>*>(g + k);
            mk = *reinterpret_cast<const Quad<M>*>(m + k);
            if (MASTER) wk = *reinterpret_cast<const Quad<float>*>(master + k);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < n) pk.at[e] = p[k + e], gk.at[e] = g[k + e], mk.at[e] = m[k + e];
                if (MASTER && e < n) wk.at[e] = master[k + e];
            }
        }
        Place at = {t.H, t.S, unsigned(t.columns), 0, unsigned(t.channels), unsigned(t.taps), 0};
        if (t.H) {
            const u64 column = first_column + k;  // fewer than 2^32 columns: the table refuses more
            at.row = first_row + (column >> 32 ? i64(column / at.columns) : i64(unsigned(column) / at.columns));
            at.column = unsigned(column - u64(at.row - first_row) * at.columns);
        }
        const u64 noise = RANDOM && h.noise ? random_bits(h.noise, t.key, (start + k) / 4) : 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (e < n) {
                const A F = t.H ? at.denominator(h.Lambda) : A(1);
                A x = value(pk.at[e]), momentum = value(mk.at[e]);
                // Another p than the master's copy has been written by the script, and counts.
                if (MASTER && x == value(rounded<P>(wk.at[e]))) x = wk.at[e];
                advance(x, value(gk.at[e]), momentum, F, h);
                if (MASTER) wk.at[e] = x;
                if (RANDOM && h.noise) pk.at[e] = rounded_at_random<P>(x, unsigned(noise >> 16 * e & 0xffff));
                else pk.at[e] = rounded<P>(x);
                mk.at[e] = rounded<M>(momentum);
                at.next();
            }
        }
        if (vector) {
            *reinterpret_cast<Quad<P>*>(p + k) = pk;
            *reinterpret_cast<Quad<M>*>(m + k) = mk;
            if (MASTER) *reinterpret_cast<Quad<float>*>(master + k) = wk;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < n) p[k + e] = pk.at[e], m[k + e] = mk.at[e];
                if (MASTER && e < n) master[k + e] = wk.at[e];
            }
        }
    }
}

// A block of a launch whose parameters are all of one kind.
template <typename P, typename M, bool MASTER = false, bool RANDOM = false>
__device__ inline void update_block(const Update& args) {
    wait_for_previous_launch();
    allow_next_launch();
    const Share share = args.shares[blockIdx.x];
    const void* gradients = gradient(args, share.item);
    if (gradients == nullptr) return;
    const Parameter t = args.parameters[share.item];
    update_chunk<P, M, MASTER, RANDOM>(hyper(args, t.hyper), share.number, gradients, t);
}
