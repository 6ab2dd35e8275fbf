// Fold: from the partial sums of column_sums.cu to the raw sums of each layer, all layers in one launch.
//
// Plain:   sums[j] = sum over slices and tiles of columns[slice, part, j].
// Patches: sums[c, i, j] = sum over slices and output positions (y, x) of the pixel sum that tap (i, j) of input
//          channel c meets there, columns[slice, pixel(c, y * sh + i * dh - ph, x * sw + j * dw - pw)]; pixels outside
//          the image are the zero padding and add nothing. Thus a convolution's patch moment needs no patches, for any
//          stride, padding and dilation, in either memory layout. average.cu adds the groups, C_in / groups channels
//          each.
//
// Plain: eight lanes a result. Patches: a warp a channel and kernel row i, or several warps where the image is large.
// Which pixels tap (i, j) meets is one question of i and y and another of j and x: so a lane adds the pixels of column
// x in all image rows that i meets, and then the lanes that j meets are added, for each j.
//
// Order of summation: fixed as in column_sums.cu. A lane's rows in order, lanes by a butterfly, the warps in order.

#include "common.cuh"

struct FoldJob {
    const A* columns;  // (slices, parts, segments) or (slices, pixels), in
    A* sums;           // (outputs), in/out
    i64 outputs;       //
    i64 run;           // as in column_sums
    i64 channel_step;  // pixel index: channel * channel_step + y * row_step + x * column_step
    i64 row_step;      //
    i64 column_step;   //
    i64 pixels;        // columns of one slice; patches only
    int slices;        //
    int parts;         //
    int tile;          // columns of a block of column_sums; plain only
    int add;           // 1: add to `sums`, 0: overwrite
    int warps;         // of a channel's kernel row, a divisor of WARPS; 0: plain
    int height, width;              // of the image
    int out_height, out_width;      //
    int kernel_height, kernel_width;
    int stride_y, stride_x;
    int padding_y, padding_x;
    int dilation_y, dilation_x;
    int unused;  // keeps the size a multiple of 8
};

struct Fold {
    const FoldJob* jobs;
    const Share* shares;  // one for each block
};

static_assert(sizeof(FoldJob) == SIZEOF_FoldJob, "kernels and cafin_cupy/table.py disagree on FoldJob");
static_assert(sizeof(Fold) == SIZEOF_Fold, "kernels and cafin_cupy/table.py disagree on Fold");

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int LANES = 8;      // of a plain result
constexpr int IN_FLIGHT = 8;  // partial sums per thread

// True if a tap at this offset from an output's first pixel meets `pixel` on one axis.
__device__ inline bool meets(int pixel, int offset, int stride, int outputs) {
    const int from_first = pixel - offset;
    return from_first >= 0 && from_first % stride == 0 && from_first / stride < outputs;
}

__device__ inline void put(const FoldJob& job, i64 output, A sum) {
    job.sums[output] = job.add ? job.sums[output] + sum : sum;
}

// Number of tiles that the columns [segment * run, (segment + 1) * run) touch.
__device__ inline int tiles_of(i64 segment, i64 run, int tile) {
    return int(((segment + 1) * run - 1) / tile - segment * run / tile) + 1;
}

__device__ inline void plain(const FoldJob& job, i64 output) {
    const int lane = threadIdx.x % LANES;
    A sum = 0;
    if (output < job.outputs) {
        const int parts = job.run == 1 ? 1 : tiles_of(output, job.run, job.tile);
        const A* column = job.columns + output;
#pragma unroll IN_FLIGHT
        for (int term = lane; term < job.slices * parts; term += LANES)
            sum += column[(i64(term / parts) * job.parts + term % parts) * job.outputs];
    }
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    if (lane == 0 && output < job.outputs) put(job, output, sum);
}

// Sum of the pixels of column x in the image rows that a kernel row meets, every job.warps-th of them. Its first output
// meets row `top`.
__device__ inline A column_sum(const FoldJob& job, const A* image, int top, int x, int warp) {
    const int step = job.warps * job.stride_y;
    const int end = min(job.height, top + (job.out_height - 1) * job.stride_y + 1);
    A sum = 0;
    for (int slice = 0; slice < job.slices; ++slice) {
        const A* column = image + slice * job.pixels + x * job.column_step;
        for (int first = top + warp * job.stride_y; first < end; first += IN_FLIGHT * step) {
            A pixel[IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; ++u) {
                const int y = first + u * step;
                pixel[u] = y >= 0 && y < end ? column[y * job.row_step] : A(0);
            }
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; ++u) sum += pixel[u];
        }
    }
    return sum;
}

// The taps of the kernel rows, counted over all channels, that this block serves.
__device__ inline void patches(const FoldJob& job, int number) {
    __shared__ A partial[WARPS][WARP];
    const int lane = threadIdx.x % WARP, place = threadIdx.x / WARP, warp = place % job.warps;
    const i64 kernel_row = i64(number) * (WARPS / job.warps) + place / job.warps;
    const bool used = kernel_row * job.kernel_width < job.outputs;
    const A* image = job.columns + kernel_row / job.kernel_height * job.channel_step;
    const int top = int(kernel_row % job.kernel_height) * job.dilation_y - job.padding_y;
    for (int from = 0; from < job.kernel_width; from += WARP) {
        const int to = min(from + WARP, job.kernel_width);
        A mine = 0;  // of tap from + lane
        for (int left = 0; used && left < job.width; left += WARP) {
            const int x = left + lane;
            const A sum = x < job.width ? column_sum(job, image, top, x, warp) : A(0);
            for (int j = from; j < to; ++j) {
                const bool met = meets(x, j * job.dilation_x - job.padding_x, job.stride_x, job.out_width);
                const A tap = warp_sum(met ? sum : A(0));
                if (lane == j - from) mine += tap;
            }
        }
        if (job.warps > 1) {
            __syncthreads();  // an earlier pass may still read
            partial[place][lane] = mine;
            __syncthreads();
            if (warp == 0)
                for (int w = 1; w < job.warps; ++w) mine += partial[place + w][lane];
        }
        if (used && warp == 0 && from + lane < to) put(job, kernel_row * job.kernel_width + from + lane, mine);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fold(const Fold args) {
    wait_for_previous_launch();
    allow_next_launch();
    const Share share = args.shares[blockIdx.x];
    const FoldJob job = args.jobs[share.item];
    if (job.warps) patches(job, share.number);
    else plain(job, (i64(share.number) * THREADS + threadIdx.x) / LANES);
}
