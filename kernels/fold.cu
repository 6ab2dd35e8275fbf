// Fold: from the partial sums of column_sums.cu to the raw sums of each layer, all layers in one launch.
//
// Plain:   sums[j] = sum over slices and tiles of columns[slice, part, j].
// Patches: sums[c, i, j] = sum over slices and output positions (y, x) of the pixel sum that tap (i, j) of input channel
//          c meets there, columns[slice, pixel(c, y * sh + i * dh - ph, x * sw + j * dw - pw)]; pixels outside the
//          image are the zero padding and add nothing. Thus a convolution's patch moment needs no patches, for any
//          stride, padding and dilation, in either memory layout. average.cu adds the groups: C_in / groups channels each.
//
// A warp per result; lanes stride over the terms and are added by a butterfly, so the order is fixed.

#include "common.cuh"

struct FoldJob {
    const A* columns;  // (slices, parts, segments) or (slices, pixels), in
    A* sums;           // (outputs), in/out
    i64 first;         // number of this job's first result among all
    i64 outputs;       //
    i64 run;           // as in column_sums
    i64 channel_step;  // pixel index: channel * channel_step + y * row_step + x * column_step
    i64 row_step;      //
    i64 column_step;   //
    i64 pixels;        // columns of one slice; patches only
    int slices;        //
    int parts;         //
    int add;           // 1: add to `sums`, 0: overwrite
    int patches;       // 0: plain
    int height, width;              // of the image
    int out_height, out_width;      //
    int kernel_height, kernel_width;
    int stride_y, stride_x;
    int padding_y, padding_x;
    int dilation_y, dilation_x;
};

struct Fold {
    const FoldJob* jobs;  // (count), ordered by `first`
    i64 outputs;          // of all jobs
    i64 count;
};

static_assert(sizeof(FoldJob) == SIZEOF_FoldJob, "kernels and cafin_cupy/table.py disagree on FoldJob");
static_assert(sizeof(Fold) == SIZEOF_Fold, "kernels and cafin_cupy/table.py disagree on Fold");

constexpr int UNROLL = 4;

__device__ inline A plain(const FoldJob& job, i64 output, int lane) {
    const int parts = job.run == 1 ? 1 : tiles_of(output, job.run);
    A sum = 0;
    for (int term = lane; term < job.slices * parts; term += WARP) {
        const i64 slot = i64(term / parts) * job.parts + term % parts;
        sum += job.columns[slot * job.outputs + output];
    }
    return sum;
}

__device__ inline A patches(const FoldJob& job, i64 output, int lane) {
    const int taps = job.kernel_height * job.kernel_width;
    const int channel = int(output / taps);
    const int tap = int(output % taps);
    const int top = tap / job.kernel_width * job.dilation_y - job.padding_y;
    const int left = tap % job.kernel_width * job.dilation_x - job.padding_x;
    const int positions = job.out_height * job.out_width;
    A sum = 0;
    for (int slice = 0; slice < job.slices; ++slice) {
        const A* image = job.columns + slice * job.pixels + channel * job.channel_step;
        for (int first = lane; first < positions; first += UNROLL * WARP) {
            A pixel[UNROLL];  // independent loads in flight
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int position = first + u * WARP;
                const int y = position / job.out_width * job.stride_y + top;
                const int x = position % job.out_width * job.stride_x + left;
                const bool seen = position < positions && y >= 0 && y < job.height && x >= 0 && x < job.width;
                pixel[u] = seen ? image[y * job.row_step + x * job.column_step] : A(0);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) sum += pixel[u];
        }
    }
    return sum;
}

extern "C" __global__ void fold(const Fold args) {
    const i64 output = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (output >= args.outputs) return;

    i64 low = 0, high = args.count;  // the last job with first <= output
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (args.jobs[middle].first <= output) low = middle;
        else high = middle;
    }
    const FoldJob& job = args.jobs[low];
    const i64 here = output - job.first;
    const A sum = warp_sum(job.patches ? patches(job, here, lane) : plain(job, here, lane));
    if (lane == 0) job.sums[here] = job.add ? job.sums[here] + sum : sum;
}
