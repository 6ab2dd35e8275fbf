// Average: raw moments, min-max normalisation and moving average of all factors, one block per layer, one launch.
//
//     raw   = sums * mean                 (norm layers: H = sum of squared sums, S = squared sums; counted ones: divided by
//                                         the total of the H sums; S: divided by the loss scale, twice)
//     x     = normalize(raw)  or  raw     (normalize: +inf -> 1, -inf -> 0, (x - min) / (max - min + 1e-6))
//     F     = keep * F + add * x
//     F_eff = F               or  normalize(F)
//
// A layer whose raw moments hold a NaN keeps its factors, which an average would never rid of it, and the case is
// counted. The vectors are short (a layer's widths), so a block walks each of them three times out of the cache.

struct Vector {
    A* sums;         // (groups, units), in; the groups are added into the first; then (tail)
    void* factor;    // (size), in/out: the moving average, A if normalised before, double if after: the ones it starts
                     // from would drown small moments in float
    A* effective;    // (size), out: what enters the preconditioner; the same array as `factor` if normalised before
    i64 units;       //
    i64 size;        // of the factor: units + tail, or units + 1 with a bias entry, or 2 for the H of a norm layer
    i64 groups;      // 1 but for the side of a grouped convolution that meets its taps
    i64 tail;        // sums of no group
    A mean;          // multiplies the sums
    A entry;         // the last entry where size exceeds what the sums give
};

struct AverageJob {
    Vector H, S;
    i64* skipped;  // (1), in/out: how often a NaN has kept the factors as they were
    int norm;      // 1: the sums are plain sums, squared here
    int counted;   // 1: the H sums are counts, and their total divides both; a total of 0 keeps the factors
};

struct Average {
    const AverageJob* jobs;  // one for each block
    double keep, add;
    double grad_scale;       // of the loss
    const float* found_inf;  // 0, or (1), in: not 0 where a scaler has found inf or NaN: the step does not happen then
    const float* scale;      // 0, or (1), in: of the loss, times grad_scale
    const i64* missed;       // 0, or (1), in: how many steps have not happened
    i64 known;               // with another number there, this step is not one that refreshes factors
    int after;               // 1: normalise after averaging
    int unused;
};

static_assert(sizeof(AverageJob) == SIZEOF_AverageJob, "kernels and cafin_cupy/table.py disagree on AverageJob");
static_assert(sizeof(Average) == SIZEOF_Average, "kernels and cafin_cupy/table.py disagree on Average");

constexpr int THREADS = 1024;
constexpr int UNROLL = 4;  // entries in flight per thread
constexpr int WARPS = THREADS / WARP;
static_assert(WARPS == WARP, "a warp reduces what the warps have found");

template <typename F>
struct Range {
    F low, high;
    int broken;  // a NaN was seen
};

__device__ inline double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }

template <typename F>
__device__ inline F clean(F x) {
    return x == F(infinity()) ? F(1) : x == F(-infinity()) ? F(0) : x;
}

template <typename F>
__device__ inline F scaled(F x, const Range<F>& r) {
    return (x - r.low) / (r.high - r.low + F(1e-6));
}

// Sum of u, or u * u, over the block, the same in all threads.
__device__ inline A block_sum(const A* u, i64 n, bool squares) {
    __shared__ A partial[WARPS];
    A sum = 0;
    for (i64 k = threadIdx.x; k < n; k += THREADS) sum += squares ? u[k] * u[k] : u[k];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = sum;
    __syncthreads();
    return warp_sum(partial[threadIdx.x % WARP]);
}

// Smallest and largest over a warp.
template <typename F>
__device__ inline void warp_range(F& low, F& high) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const F other_low = __shfl_xor_sync(ALL_LANES, low, offset);
        const F other_high = __shfl_xor_sync(ALL_LANES, high, offset);
        low = other_low < low ? other_low : low;
        high = other_high > high ? other_high : high;
    }
}

// Smallest and largest of clean(value(k)) over the block, the same in all threads.
template <typename F, typename Value>
__device__ inline Range<F> block_range(i64 n, Value value) {
    __shared__ F lows[WARPS], highs[WARPS];
    F low = F(infinity()), high = F(-infinity());
    bool broken = false;
#pragma unroll UNROLL
    for (i64 k = threadIdx.x; k < n; k += THREADS) {
        const F x = clean(F(value(k)));
        broken |= x != x;
        low = x < low ? x : low;
        high = x > high ? x : high;
    }
    warp_range(low, high);
    const int any_broken = __syncthreads_or(broken);  // and nobody reads an earlier call's results any more
    if (threadIdx.x % WARP == 0) lows[threadIdx.x / WARP] = low, highs[threadIdx.x / WARP] = high;
    __syncthreads();
    low = lows[threadIdx.x % WARP], high = highs[threadIdx.x % WARP];
    warp_range(low, high);
    return {low, high, any_broken};
}

// Adds the groups. A thread adds what it alone reads later.
__device__ inline void add_groups(const Vector& v) {
    for (i64 k = threadIdx.x; v.groups > 1 && k < v.units; k += THREADS) {
        A sum = v.sums[k];
        for (i64 g = 1; g < v.groups; ++g) sum += v.sums[g * v.units + k];
        v.sums[k] = sum;
    }
}

// One raw moment. `squares`: the total of a norm layer's squared sums, used for its H; `squared`: square each sum (its
// S).
struct Raw {
    const Vector& v;
    A mean;
    A squares;
    bool whole;    // the first entry is `squares` times mean
    bool squared;

    __device__ A operator()(i64 k) const {
        if (k >= (whole ? 1 : v.units + v.tail)) return v.entry;
        if (whole) return squares * mean;
        const A x = v.sums[k < v.units ? k : (v.groups - 1) * v.units + k];
        return (squared ? x * x : x) * mean;
    }
};

// M: of a moving average that is normalised afterwards.
template <typename M>
__device__ inline void follow(const Vector& v, const Raw& raw, const Range<A>& range, const Average& rule) {
    if (!rule.after) {
        A* factor = static_cast<A*>(v.factor);
        const A keep = A(rule.keep), add = A(rule.add);
#pragma unroll UNROLL
        for (i64 k = threadIdx.x; k < v.size; k += THREADS)
            factor[k] = keep * factor[k] + add * scaled(clean(raw(k)), range);
        return;
    }
    M* factor = static_cast<M*>(v.factor);
    const M keep = M(rule.keep), add = M(rule.add);
#pragma unroll UNROLL
    for (i64 k = threadIdx.x; k < v.size; k += THREADS) factor[k] = keep * factor[k] + add * M(clean(raw(k)));
    const Range<M> settled = block_range<M>(v.size, [factor](i64 k) { return factor[k]; });
    for (i64 k = threadIdx.x; k < v.size; k += THREADS) v.effective[k] = A(scaled(clean(factor[k]), settled));
}

// In double: the same bits, whether the host or the device knows the scale.
__device__ inline A unscaled(A mean, const Average& rule) {
    const double scale = rule.grad_scale * (rule.scale ? double(*rule.scale) : 1.0);
    return A(mean / scale / scale);
}

// One layer; false if its raw moments hold a NaN.
template <typename M>
__device__ inline bool refresh(const AverageJob& job, const Average& rule) {
    add_groups(job.H);
    add_groups(job.S);
    const bool norm = job.norm;
    const A total = norm || job.counted ? block_sum(job.H.sums, job.H.units, norm) : A(1);
    if (job.counted && total == 0) return true;  // as if it had not been called
    const A by = job.counted ? total : A(1);
    const Raw H = {job.H, job.H.mean / by, total, norm, false};
    const Raw S = {job.S, unscaled(job.S.mean, rule) / by, A(0), false, norm};
    const Range<A> H_range = block_range<A>(job.H.size, H), S_range = block_range<A>(job.S.size, S);
    if (H_range.broken || S_range.broken) return false;
    follow<M>(job.H, H, H_range, rule);
    follow<M>(job.S, S, S_range, rule);
    return true;
}
