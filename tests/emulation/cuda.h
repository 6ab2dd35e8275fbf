// What the kernels use of CUDA C++, for a C++ compiler. Their source follows, then EMULATE(name) for each kernel.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "blocks.h"

#define EMULATED
#define __global__
#define __device__
#define __constant__ static
#define __launch_bounds__(...)
#define __shared__ static  // compiler.py adds POISON behind each declaration

using emulation::blockIdx;
using emulation::threadIdx;

#define __syncthreads() ((void)emulation::wait(emulation::BARRIER, 0, __LINE__))
#define __syncthreads_or(x) ((int)emulation::wait(emulation::BARRIER, !!(x), __LINE__))
#define __shfl_xor_sync(mask, x, bits) emulation::shuffle_xor(mask, x, bits, __LINE__)

// Fills shared memory with NaN once a block.
#define POISON(x)                                                                            \
    do {                                                                                     \
        static unsigned long long seen;                                                      \
        if (seen != emulation::block_number) memset((void*)&x, 0xff, sizeof x);              \
        seen = emulation::block_number;                                                      \
    } while (0)

namespace emulation {
template <typename To, typename From>
To bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

template <typename V>
V shuffle_xor(unsigned mask, V x, unsigned bits, int line) {
    static_assert(std::is_arithmetic_v<V> && sizeof(V) <= sizeof(u64));
    if (mask != 0xffffffffu) mask_refused = true;
    u64 word = 0;
    memcpy(&word, &x, sizeof x);
    word = wait(SHUFFLE, word, line, (threadIdx.x ^ bits) % WARP_SIZE);
    memcpy(&x, &word, sizeof x);
    return x;
}
}  // namespace emulation

template <typename V, typename W>
std::common_type_t<V, W> min(V a, W b) {
    static_assert(std::is_integral_v<V> && std::is_integral_v<W>, "of floats, CUDA's min ignores NaN");
    return b < a ? b : a;
}
template <typename V, typename W>
std::common_type_t<V, W> max(V a, W b) {
    static_assert(std::is_integral_v<V> && std::is_integral_v<W>, "of floats, CUDA's max ignores NaN");
    return b > a ? b : a;
}

inline double __longlong_as_double(long long x) { return emulation::bits<double>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulation::bits<unsigned>(x); }

// What common.cuh has in PTX. By integers: denormal halves are normal floats, and denormal floats count as 0 here.
inline float half_to_float(unsigned short half) {
    const unsigned sign = unsigned(half & 0x8000) << 16;
    int exponent = half >> 10 & 31;
    unsigned fraction = half & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        if (fraction == 0) return __uint_as_float(sign);
        for (exponent = 1; !(fraction & 1024); --exponent) fraction <<= 1;
        fraction &= 1023;
    }
    return __uint_as_float(sign | unsigned(exponent + 112) << 23 | fraction << 13);
}
// To the nearest half, ties to even: scaled so that the last bit of a half is a whole number.
inline unsigned short float_to_half(float x) {
    const unsigned short sign = (unsigned short)(__float_as_uint(x) >> 16 & 0x8000);
    const float size = fabsf(x);
    if (size != size) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;  // halfway to the first number that is too large
    int exponent;
    frexpf(size, &exponent);  // size < 2^exponent
    const int last = (size < 0x1p-14f ? -13 : exponent) - 11;
    const unsigned units = (unsigned)nearbyintf(ldexpf(size, -last));
    return sign | (unsigned short)(units + ((unsigned)(last + 24) << 10));
}
inline void wait_for_previous_launch() {}
inline void allow_next_launch() {}

namespace emulation {
template <typename... Arguments>
constexpr bool lone(void (*)(Arguments...)) {
    return sizeof...(Arguments) == 1;
}
template <typename... Arguments>
constexpr size_t size_of_arguments(void (*)(Arguments...)) {
    return (sizeof(Arguments) + ... + 0);
}
template <typename... Arguments, size_t... Place>
void call(void (*kernel)(Arguments...), std::index_sequence<Place...>) {
    kernel(*static_cast<const std::remove_reference_t<Arguments>*>(arguments[Place])...);
}
template <typename... Arguments>
void call(void (*kernel)(Arguments...)) {
    call(kernel, std::index_sequence_for<Arguments...>());
}
}  // namespace emulation

// emulate_<kernel>(grid, block, addresses of the arguments, seed of the order): null, or what went wrong. Kernels of
// several arguments are XLA's, which serves no device that takes but 4 KiB.
#define EMULATE(kernel)                                                                                            \
    static_assert(!emulation::lone(kernel) || emulation::size_of_arguments(kernel) <= 4096,                         \
                  "every device takes 4 KiB of arguments");                                                        \
    static_assert(emulation::size_of_arguments(kernel) <= 32764, "CUDA 12.1 takes 32,764 bytes of arguments");     \
    static void enter_##kernel() { emulation::call(kernel); }                                                      \
    extern "C" __attribute__((visibility("default"))) const char* emulate_##kernel(                                \
        int grid, int block, const void* const* arguments, unsigned seed) {                                        \
        return emulation::run(enter_##kernel, grid, block, arguments, seed);                                       \
    }
