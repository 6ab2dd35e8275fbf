// Fold: from the partial sums of column_sums.cuh to the raw sums of each layer, all layers in one launch.
//
// Plain:   sums[j] = sum over slices and tiles of columns[slice, part, j].
// Patches: sums[c, k, i, j] = sum over slices and output positions (z, y, x) of the pixel sum that tap (k, i, j) of
//          channel c meets there, columns[slice, pixel(c, z * sd + k * dd - pd, y * sh + i * dh - ph,
//          x * sw + j * dw - pw)]; pixels outside the image are the zero padding and add nothing. Thus a convolution's
//          patch moment needs no patches, for any stride, padding and dilation, in either memory layout. An image of
//          two axes has depth 1, one of one axis height 1 as well. average.cuh adds the groups, C_in / groups channels
//          each.
//
// Plain: eight lanes a result. Patches: a warp a channel and kernel row (k, i), or several warps where the image is
// large. Which pixels tap (k, i, j) meets is one question of k and z, another of i and y, and another of j and x: so a
// lane adds the pixels of column x in all image rows that (k, i) meets, and then the lanes that j meets are added, for
// each j. Several warps share the rows, or, where there are few, the columns.
//
// Order of summation: fixed as in column_sums.cuh. A lane's rows in order, lanes by a butterfly, the warps in order.

struct FoldJob {
    const A* columns;  // (slices, parts, segments) or (slices, pixels), in
    A* sums;           // (outputs), in/out
    i64 outputs;       //
    i64 run;           // as in column_sums
    i64 channel_step;  // pixel index: channel * channel_step + z * depth_step + y * row_step + x * column_step
    i64 depth_step;    //
    i64 row_step;      //
    i64 column_step;   //
    i64 pixels;        // columns of one slice; patches only
    int slices;        //
    int parts;         //
    int tile;          // columns of a block of column_sums; plain only
    int add;           // 1: add to `sums`, 0: overwrite
    int across, down;  // warps of a channel's kernel row, a divisor of WARPS: they share the columns and the rows of the
                       // image; 0: plain
    int depth, height, width;              // of the image
    int out_depth, out_height, out_width;  //
    int kernel_depth, kernel_height, kernel_width;
    int stride_z, stride_y, stride_x;
    int padding_z, padding_y, padding_x;
    int dilation_z, dilation_y, dilation_x;
    A scale;     // multiplies the results; patches only
    int unused;  // keeps the size a multiple of 8
};

static_assert(sizeof(FoldJob) == SIZEOF_FoldJob, "kernels and cafin_cupy/table.py disagree on FoldJob");

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

// Sum of the pixels of column x in the image rows that a kernel row meets, every job.down-th of them. Its first output
// meets row `top` of layer `front`.
__device__ inline A column_sum(const FoldJob& job, const A* image, int front, int top, int x, int warp) {
    const int step = job.down * job.stride_y;
    const int end = min(job.height, top + (job.out_height - 1) * job.stride_y + 1);
    const int back = min(job.depth, front + (job.out_depth - 1) * job.stride_z + 1);
    A sum = 0;
    for (int slice = 0; slice < job.slices; ++slice)
        for (int z = front; z < back; z += job.stride_z) {
            if (z < 0) continue;
            const A* column = image + slice * job.pixels + z * job.depth_step + x * job.column_step;
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
    const int warps = job.across * job.down, lane = threadIdx.x % WARP, place = threadIdx.x / WARP;
    const int warp = place % warps;
    const i64 kernel_row = i64(number) * (WARPS / warps) + place / warps;
    const bool used = kernel_row * job.kernel_width < job.outputs;
    const i64 kernel_layer = kernel_row / job.kernel_height;  // counted likewise
    const int i = int(kernel_row - kernel_layer * job.kernel_height);
    const i64 channel = job.kernel_depth == 1 ? kernel_layer : kernel_layer / job.kernel_depth;
    const int k = int(kernel_layer - channel * job.kernel_depth);
    const int front = k * job.dilation_z - job.padding_z, top = i * job.dilation_y - job.padding_y;
    const A* image = job.columns + channel * job.channel_step;
    const int step = WARP * job.across, beside = WARP * (warp % job.across), below = warp / job.across;
    for (int from = 0; from < job.kernel_width; from += WARP) {
        const int to = min(from + WARP, job.kernel_width);
        A mine = 0;  // of tap from + lane
        for (int left = beside; used && left < job.width; left += step) {
            const int x = left + lane;
            const A sum = x < job.width ? column_sum(job, image, front, top, x, below) : A(0);
            for (int j = from; j < to; ++j) {
                const bool met = meets(x, j * job.dilation_x - job.padding_x, job.stride_x, job.out_width);
                const A tap = warp_sum(met ? sum : A(0));
                if (lane == j - from) mine += tap;
            }
        }
        if (warps > 1) {
            __syncthreads();  // an earlier pass may still read
            partial[place][lane] = mine;
            __syncthreads();
            if (warp == 0)
                for (int w = 1; w < warps; ++w) mine += partial[place + w][lane];
        }
        if (used && warp == 0 && from + lane < to)
            put(job, kernel_row * job.kernel_width + from + lane, mine * job.scale);
    }
}

// Blocks of a multiprocessor, so that a thread has 48 registers, or 80 where these do not suffice: left to itself, the
// compiler spills some.
#if __CUDA_ARCH__ >= 800
constexpr int BLOCKS = 5;
#else
constexpr int BLOCKS = 3;
#endif

// A block's share of a job.
__device__ inline void fold_block(const FoldJob& job, int number) {
    if (job.across) patches(job, number);
    else plain(job, (i64(number) * THREADS + threadIdx.x) / LANES);
}
