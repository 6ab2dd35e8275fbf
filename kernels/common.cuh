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

// 16-bit floats, by their bits: CUDA's headers need not be installed.
enum class Bfloat16 : unsigned short {};
enum class Half : unsigned short {};

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

#ifndef EMULATED
__device__ inline float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ inline unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Programmatic dependent launch: a kernel may start while the one before it in its stream still runs, and stays away
// from memory until that one has ended. It hides the launch behind the tail of the kernel before.
__device__ inline void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
#endif

// Neighbours that are read or written in one access: four, or eight of 16 bits.
template <typename E>
constexpr int NEIGHBOURS = sizeof(E) == 2 ? 8 : 4;

template <typename E>
struct alignas(NEIGHBOURS<E> * sizeof(E)) Pack {
    E at[NEIGHBOURS<E>];
};

template <typename E>
__device__ inline A value(E x) {
    return A(x);
}
template <>
__device__ inline A value(Bfloat16 x) {
    return A(__uint_as_float(unsigned(x) << 16));
}
template <>
__device__ inline A value(Half x) {
    return A(half_to_float((unsigned short)(x)));
}

// What a block works on, told by a table with one for each block.
struct Share {
    int item;
    int number;  // the block's place within the item
};

// Butterfly sum: every lane gets the total, added in the same order on every run.
__device__ inline A warp_sum(A x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}
