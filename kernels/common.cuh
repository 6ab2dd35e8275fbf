// Shared by all kernels.
//
// T  element type of the tensors, set by the loader
// A  type of sums, factors and arithmetic: float, or double where T is double
//
// The structs that kernels take are mirrored in cafin_cupy/table.py; the loader passes each size as SIZEOF_<name>,
// and a mismatch is a compile error.

typedef ELEMENT T;
typedef ARITHMETIC A;
typedef long long i64;
typedef unsigned long long u64;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// Columns that one block of column_sums covers; fold needs it to know how many blocks met a run of columns.
constexpr int TILE = 128;

// Four neighbours, read or written in one access.
template <typename E>
struct alignas(4 * sizeof(E)) Four {
    E at[4];
};

// Butterfly sum: every lane gets the total, added in the same order on every run.
__device__ inline A warp_sum(A x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// Number of tiles that the columns [segment * run, (segment + 1) * run) touch.
__device__ inline int tiles_of(i64 segment, i64 run) {
    return int(((segment + 1) * run - 1) / TILE - segment * run / TILE) + 1;
}
