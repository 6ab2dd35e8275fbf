// Update, mixed: as update.cu, where some parameters or momenta are of 16 bits. A file of its own, as it takes longer to
// compile, and most models need none of it.
//
// Bytes an element: p and g of 16 bits and m float32: 14; all of 16 bits: 10; p and g of 16 bits, m float32 and a master:
// 22, as p is read to notice what a script has written there. float32 with m of 16 bits: 16.

#include "common.cuh"
#include "rounding.cuh"
#include "update.cuh"

// One kernel for each kind of parameter.
extern "C" __global__ void __launch_bounds__(THREADS)
    update_float32_bfloat16(const Update args) { update_block<float, Bfloat16>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_float32_float16(const Update args) { update_block<float, Half>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_bfloat16_float32(const Update args) { update_block<Bfloat16, float, false, true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_bfloat16_bfloat16(const Update args) { update_block<Bfloat16, Bfloat16, false, true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_bfloat16_float32_master(const Update args) { update_block<Bfloat16, float, true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_bfloat16_bfloat16_master(const Update args) { update_block<Bfloat16, Bfloat16, true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_float16_float32(const Update args) { update_block<Half, float, false, true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_float16_float16(const Update args) { update_block<Half, Half, false, true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_float16_float32_master(const Update args) { update_block<Half, float, true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS)
    update_float16_float16_master(const Update args) { update_block<Half, Half, true>(args); }

// Blocks that must fit a multiprocessor, which bounds their registers; 0 leaves that to the compiler. Left to itself it
// goes down to 64 on 7.5 as well, and needs local memory for it.
#if __CUDA_ARCH__ >= 800
#define BLOCKS 0
#else
#define BLOCKS 2
#endif

// One for all kinds together, in one launch. It takes half as many registers again as one for a single kind.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) update_mixed(const Update args) {
    wait_for_previous_launch();
    allow_next_launch();
    const Share share = args.shares[blockIdx.x];
    const void* gradients = gradient(args, share.item);
    if (gradients == nullptr) return;
    const Parameter t = args.parameters[share.item];
    const Hyper h = hyper(args, t.hyper);
    switch (t.kind) {
        case kind(FLOAT32, FLOAT32): return update_chunk<float, float>(h, share.number, gradients, t);
        case kind(FLOAT32, BFLOAT16): return update_chunk<float, Bfloat16>(h, share.number, gradients, t);
        case kind(FLOAT32, HALF): return update_chunk<float, Half>(h, share.number, gradients, t);
        case kind(BFLOAT16, FLOAT32): return update_chunk<Bfloat16, float, false, true>(h, share.number, gradients, t);
        case kind(BFLOAT16, BFLOAT16): return update_chunk<Bfloat16, Bfloat16, false, true>(h, share.number, gradients, t);
        case kind(BFLOAT16, FLOAT32, true): return update_chunk<Bfloat16, float, true>(h, share.number, gradients, t);
        case kind(BFLOAT16, BFLOAT16, true): return update_chunk<Bfloat16, Bfloat16, true>(h, share.number, gradients, t);
        case kind(HALF, FLOAT32): return update_chunk<Half, float, false, true>(h, share.number, gradients, t);
        case kind(HALF, HALF): return update_chunk<Half, Half, false, true>(h, share.number, gradients, t);
        case kind(HALF, FLOAT32, true): return update_chunk<Half, float, true>(h, share.number, gradients, t);
        case kind(HALF, HALF, true): return update_chunk<Half, Half, true>(h, share.number, gradients, t);
    }
}
