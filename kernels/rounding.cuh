// Float32 to types of 16 bits, and the random numbers for it. cafin_cupy/rounding.py computes the same bits.

// The nearest number of a type, ties to even.
template <typename E>
__device__ inline E rounded(A x) {
    return E(x);
}
template <>
__device__ inline Half rounded<Half>(A x) {
    return Half(float_to_half(x));
}
__device__ inline Bfloat16 upper_half(unsigned bits) { return Bfloat16((unsigned short)(bits >> 16)); }
template <>
__device__ inline Bfloat16 rounded<Bfloat16>(A x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return upper_half(bits | 0x400000);  // adding to it could make an infinity
    return upper_half(bits + 0x7fff + (bits >> 16 & 1));
}

// The next number of a type below or above in magnitude, at random by 16 bits: on average x itself. What cannot be
// larger than the largest number may become infinite.
template <typename E>
__device__ inline E rounded_at_random(A x, unsigned noise) {
    return rounded<E>(x);
}
template <>
__device__ inline Bfloat16 rounded_at_random<Bfloat16>(A x, unsigned noise) {
    if (x - x != 0) return rounded<Bfloat16>(x);  // infinite, or NaN
    return upper_half(__float_as_uint(x) + noise);
}
template <>
__device__ inline Half rounded_at_random<Half>(A x, unsigned noise) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (size >= 0x47800000) return rounded<Half>(x);  // 2^16 and above: infinite, or NaN
    // Below 2^-14 all neighbours lie 2^-24 apart; above, 2^13 units in the last place of a float.
    const unsigned half = size < 0x38800000 ? unsigned(__uint_as_float(size) * 0x1p40f) + noise >> 16
                                            : (size + (noise >> 3) >> 13) - (112 << 10);
    return Half((unsigned short)(sign | half));
}

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014), and the step between its states.
constexpr u64 GOLDEN = 0x9e3779b97f4a7c15ull;
__device__ inline u64 mixed(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// What tells the random numbers of one step from those of others; never 0.
__device__ inline unsigned step_noise(u64 begin, i64 step) {
    const unsigned noise = unsigned(mixed(begin + GOLDEN * u64(step)) >> 32);
    return noise ? noise : 1;
}

// 64 random bits for the four elements number `quad` of a parameter.
__device__ inline u64 random_bits(unsigned noise, int key, i64 quad) {
    return mixed((u64(noise) << 32 | unsigned(key)) + GOLDEN * u64(quad + 1));
}
