// Update: one AdaFisher step of all parameters, all of them float32, in one launch; update.cuh has the rule. And
// `schedule`, which counts steps on the device.

#include "common.cuh"
#include "rounding.cuh"
#include "update.cuh"

// Scalars of a group of parameters, for counters that live on the device.
struct Rate {
    double lr, beta, Lambda, l2, decay, grad_scale;  // decay: of AdaFisherW, in units of lr
    const float* lr_at;                              // 0, or where lr lies
    u64 begin;                                       // of the random numbers; 0: parameters are rounded to the nearest
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
    const float* found_inf;  // 0, or (1), in: not 0 where a scaler has found inf or NaN: the step does not happen then
    const float* scale;      // 0, or (1), in: of the gradients, times that of the rates
    i64* skipped;            // (1), in/out: counts the steps that do not happen; 0 without found_inf
    u64 present[FLAGS]; // a bit for each: it has a gradient
};

static_assert(sizeof(Rate) == SIZEOF_Rate, "kernels and cafin_cupy/table.py disagree on Rate");
static_assert(sizeof(Schedule) == SIZEOF_Schedule, "kernels and cafin_cupy/table.py disagree on Schedule");

// Parameters, gradients and momenta of float32.
extern "C" __global__ void __launch_bounds__(THREADS) update(const Update args) { update_block<float, float>(args); }

// Ahead of an update in a CUDA graph: counts the step of each parameter that has a gradient, and sets its scalars.
extern "C" __global__ void __launch_bounds__(THREADS) schedule(const Schedule args) {
    wait_for_previous_launch();
    allow_next_launch();
    const int place = blockIdx.x * THREADS + threadIdx.x;
    const i64 k = args.first + place;
    const bool skips = args.found_inf && *args.found_inf != 0.0f;
    if (skips && k == 0) *args.skipped += args.by;
    if (place >= 64 * FLAGS || k >= args.count || !(args.present[place / 64] >> (place % 64) & 1)) return;
    if (skips) {
        args.hypers[k].grad_scale = A(0);
        return;
    }
    const Rate r = args.rates[args.groups[k]];
    const double lr = r.lr_at ? double(*r.lr_at) : r.lr;
    const i64 step = args.steps[k] += args.by;
    const double scale = r.grad_scale * (args.scale ? double(*args.scale) : 1.0);
    args.hypers[k] = {A(lr / (1.0 - pow(r.beta, double(step)))), A(lr * r.decay),  A(r.l2), A(r.beta), A(1.0 - r.beta),
                      A(r.Lambda), A(1.0 / scale), r.begin ? step_noise(r.begin, step) : 0};
}
