// Element types and operators with the bits of the host's: src/dtype/number.rs and op.rs.
//
// `Number` is the type that SYMMEM_T names. Elements travel as bits in 32-bit words; `Wide` is what they are computed
// in. 8- and 16-bit floats compute in f32 and round once. A result that is no number is always the same NaN.
#pragma once

#include "vectors.cuh"

// The host's `ReduceOp as u32`.
enum Op : symmem_u32 { SUM, AVERAGE, PRODUCT, MIN, MAX, AND, OR, XOR };

// Integers in registers of 32 or 64 bits: sums and products agree with narrower ones in the bits that are kept.
template <class W, int B> struct Integer {
    typedef W Wide;
    static const int BYTES = B;
    static __device__ __forceinline__ W widen(symmem_u64 bits) {
        const int unused = 8 * (sizeof(W) - B);
        return (W)((W)bits << unused) >> unused; // with the sign, where W has one
    }
    static __device__ __forceinline__ symmem_u64 narrow(W wide) { return (symmem_u64)wide; }
    static __device__ __forceinline__ W add(W a, W b) { return a + b; }
    static __device__ __forceinline__ W multiply(W a, W b) { return a * b; }
    static __device__ __forceinline__ W min(W a, W b) { return a < b ? a : b; }
    static __device__ __forceinline__ W max(W a, W b) { return a > b ? a : b; }
    static __device__ __forceinline__ W divide(W a, symmem_u32 ranks) {
        return widen((symmem_u64)a) / (W)ranks; // of the sum as it wrapped; 72 ranks fit into every type
    }
    template <int N> static __device__ __forceinline__ W divide(W a) { return widen((symmem_u64)a) / (W)N; }
    static __device__ __forceinline__ W bits(Op op, W a, W b) {
        return op == AND ? a & b : op == OR ? a | b : a ^ b;
    }
};

// Truth values: 0 is false, everything else is true. Results are 0 or 1.
struct Truth {
    typedef symmem_u32 Wide;
    static const int BYTES = 1;
    static __device__ __forceinline__ symmem_u32 widen(symmem_u64 bits) { return bits != 0; }
    static __device__ __forceinline__ symmem_u64 narrow(symmem_u32 wide) { return wide; }
    static __device__ __forceinline__ symmem_u32 add(symmem_u32 a, symmem_u32 b) { return a | b; }
    static __device__ __forceinline__ symmem_u32 multiply(symmem_u32 a, symmem_u32 b) { return a & b; }
    static __device__ __forceinline__ symmem_u32 min(symmem_u32 a, symmem_u32 b) { return a & b; }
    static __device__ __forceinline__ symmem_u32 max(symmem_u32 a, symmem_u32 b) { return a | b; }
    static __device__ __forceinline__ symmem_u32 divide(symmem_u32 a, symmem_u32) { return a; } // refused by the host
    template <int N> static __device__ __forceinline__ symmem_u32 divide(symmem_u32 a) { return a; }
    static __device__ __forceinline__ symmem_u32 bits(Op op, symmem_u32 a, symmem_u32 b) {
        return op == AND ? a & b : op == OR ? a | b : a ^ b;
    }
};

struct F32 {
    typedef float Wide;
    static const int BYTES = 4;
    static __device__ __forceinline__ float widen(symmem_u64 bits) { return __uint_as_float((symmem_u32)bits); }
    static __device__ __forceinline__ symmem_u64 narrow(float x) { return x != x ? 0x7fc00000 : __float_as_uint(x); }
    static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
    static __device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
    static __device__ __forceinline__ float min(float a, float b) {
        // Equal values differ at most in the sign of zero.
        float equal = __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
        float number = a < b ? a : b < a ? b : equal;
        return a != a || b != b ? __uint_as_float(0x7fc00000) : number;
    }
    static __device__ __forceinline__ float max(float a, float b) {
        float equal = __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
        float number = a > b ? a : b > a ? b : equal;
        return a != a || b != b ? __uint_as_float(0x7fc00000) : number;
    }
    static __device__ __forceinline__ float divide(float a, symmem_u32 ranks) { return __fdiv_rn(a, (float)ranks); }
    // By a power of two: the product is rounded as the quotient is.
    template <int N> static __device__ __forceinline__ float divide(float a) { return __fmul_rn(a, 1.0f / N); }
    static __device__ __forceinline__ float bits(Op, float a, float) { return a; } // refused by the host
};

struct F64 {
    typedef double Wide;
    static const int BYTES = 8;
    static __device__ __forceinline__ double nan() { return __longlong_as_double(0x7ff8000000000000); }
    static __device__ __forceinline__ double widen(symmem_u64 bits) { return __longlong_as_double((long long)bits); }
    static __device__ __forceinline__ symmem_u64 narrow(double x) {
        return (symmem_u64)__double_as_longlong(x != x ? nan() : x);
    }
    static __device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
    static __device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
    static __device__ __forceinline__ double min(double a, double b) {
        double equal = __longlong_as_double(__double_as_longlong(a) | __double_as_longlong(b));
        double number = a < b ? a : b < a ? b : equal;
        return a != a || b != b ? nan() : number;
    }
    static __device__ __forceinline__ double max(double a, double b) {
        double equal = __longlong_as_double(__double_as_longlong(a) & __double_as_longlong(b));
        double number = a > b ? a : b > a ? b : equal;
        return a != a || b != b ? nan() : number;
    }
    static __device__ __forceinline__ double divide(double a, symmem_u32 ranks) {
        return __ddiv_rn(a, (double)ranks);
    }
    template <int N> static __device__ __forceinline__ double divide(double a) { return __dmul_rn(a, 1.0 / N); }
    static __device__ __forceinline__ double bits(Op, double a, double) { return a; }
};

// Complex numbers of which each part is an F: sums go by part, and in a product each multiplication and addition is rounded.
template <class F> struct Complex {
    typedef typename F::Wide Part;
    struct Wide {
        Part re, im;
    };
    static const int BYTES = 2 * F::BYTES;
    typedef typename Raw<BYTES>::Type Bits;
    static __device__ __forceinline__ Wide widen(Bits bits) {
        if constexpr (BYTES == 16) {
            return {F::widen(bits.low), F::widen(bits.high)};
        } else {
            return {F::widen(bits & 0xffffffff), F::widen(bits >> 32)};
        }
    }
    static __device__ __forceinline__ Bits narrow(Wide x) {
        if constexpr (BYTES == 16) {
            return {F::narrow(x.re), F::narrow(x.im)};
        } else {
            return F::narrow(x.re) | F::narrow(x.im) << 32;
        }
    }
    static __device__ __forceinline__ Wide add(Wide a, Wide b) { return {F::add(a.re, b.re), F::add(a.im, b.im)}; }
    static __device__ __forceinline__ Wide multiply(Wide a, Wide b) {
        return {F::add(F::multiply(a.re, b.re), -F::multiply(a.im, b.im)),
                F::add(F::multiply(a.re, b.im), F::multiply(a.im, b.re))};
    }
    static __device__ __forceinline__ Wide min(Wide a, Wide) { return a; } // refused by the host, as what follows
    static __device__ __forceinline__ Wide max(Wide a, Wide) { return a; }
    static __device__ __forceinline__ Wide bits(Op, Wide a, Wide) { return a; }
    static __device__ __forceinline__ Wide divide(Wide a, symmem_u32 ranks) {
        return {F::divide(a.re, ranks), F::divide(a.im, ranks)};
    }
    template <int N> static __device__ __forceinline__ Wide divide(Wide a) {
        return {F::template divide<N>(a.re), F::template divide<N>(a.im)};
    }
};

struct BF16 : F32 {
    static const int BYTES = 2;
    static __device__ __forceinline__ float widen(symmem_u64 bits) {
        return __uint_as_float((symmem_u32)bits << 16);
    }
    static __device__ __forceinline__ symmem_u64 narrow(float x) {
        unsigned short rounded;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
        return x != x ? 0x7fc0 : rounded;
    }
};

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
    return wide;
}

struct F16 : F32 {
    static const int BYTES = 2;
    static __device__ __forceinline__ float widen(symmem_u64 bits) { return half_to_float((unsigned short)bits); }
    static __device__ __forceinline__ symmem_u64 narrow(float x) {
        unsigned short rounded;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
        return x != x ? 0x7e00 : rounded;
    }
};

// The magnitude of a finite f32 with M bits of mantissa and exponent bias B, to nearest, ties to even.
template <symmem_u32 M, symmem_u32 B> __device__ __forceinline__ symmem_u32 round_magnitude(symmem_u32 magnitude) {
    const symmem_u32 shift = 23 - M;
    symmem_u32 odd = (magnitude >> shift) & 1;
    symmem_u32 normal = (magnitude - ((127 - B) << 23) + ((1u << (shift - 1)) - 1) + odd) >> shift;
    // Below the normal numbers an addition aligns the bits, and rounds as additions do.
    const symmem_u32 align = (127 + 24 - B - M) << 23;
    symmem_u32 tiny = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(align))) - align;
    return magnitude < ((127 - B + 1) << 23) ? tiny : normal;
}

// Its bits are the upper half of a 16-bit float's.
struct F8E5M2 : F32 {
    static const int BYTES = 1;
    static __device__ __forceinline__ float widen(symmem_u64 bits) {
        return half_to_float((unsigned short)(bits << 8));
    }
    static __device__ __forceinline__ symmem_u64 narrow(float x) {
        symmem_u32 magnitude = __float_as_uint(x) & 0x7fffffff;
        symmem_u32 sign = (__float_as_uint(x) >> 31) << 7;
        symmem_u32 number = magnitude >= ((127 + 16) << 23) ? 0x7c : round_magnitude<2, 15>(magnitude);
        return x != x ? 0x7e : number | sign;
    }
};

// No infinities: one more binade of numbers, and a single NaN, that stands for what is too large as well.
struct F8E4M3 : F32 {
    static const int BYTES = 1;
    static __device__ __forceinline__ float widen(symmem_u64 bits) {
        symmem_u32 b = (symmem_u32)bits;
        // As a 16-bit float the same bits mean 2^8 less, subnormal numbers included.
        float number = __fmul_rn(half_to_float((unsigned short)((b & 0x80) << 8 | (b & 0x7f) << 7)), 256.0f);
        return (b & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000) : number;
    }
    static __device__ __forceinline__ symmem_u64 narrow(float x) {
        symmem_u32 magnitude = __float_as_uint(x) & 0x7fffffff;
        symmem_u32 sign = (__float_as_uint(x) >> 31) << 7;
        symmem_u32 rounded = round_magnitude<3, 7>(magnitude);
        bool too_large = rounded > 0x7e || magnitude >= ((127 + 9) << 23);
        return x != x || too_large ? 0x7f : rounded | sign;
    }
};

typedef F64 Number_f64;
typedef F32 Number_f32;
typedef F16 Number_f16;
typedef BF16 Number_bf16;
typedef F8E4M3 Number_f8e4m3;
typedef F8E5M2 Number_f8e5m2;
typedef Integer<int, 1> Number_i8;
typedef Integer<int, 2> Number_i16;
typedef Integer<int, 4> Number_i32;
typedef Integer<long long, 8> Number_i64;
typedef Integer<symmem_u32, 1> Number_u8;
typedef Integer<symmem_u32, 2> Number_u16;
typedef Integer<symmem_u32, 4> Number_u32;
typedef Integer<symmem_u64, 8> Number_u64;
typedef Truth Number_bool;
typedef Complex<F32> Number_c64;
typedef Complex<F64> Number_c128;

#define NUMBER_OF(name) Number_##name
#define NUMBER(name) NUMBER_OF(name)
typedef NUMBER(SYMMEM_T) Number;
typedef Raw<Number::BYTES>::Type ElementBits;

__device__ __forceinline__ Number::Wide combine(Op op, Number::Wide a, Number::Wide b) {
    return op <= AVERAGE    ? Number::add(a, b)
           : op == PRODUCT ? Number::multiply(a, b)
           : op == MIN     ? Number::min(a, b)
           : op == MAX     ? Number::max(a, b)
                           : Number::bits(op, a, b);
}

// The elements in W words of 32 bits, wide.
template <int W> struct Pack {
    static const int LANES = 4 * W / Number::BYTES;
    Number::Wide lanes[LANES];

    static __device__ __forceinline__ symmem_u64 pair(const symmem_u32 (&words)[W], int i) {
        return words[i % W] | (symmem_u64)words[(i + 1) % W] << 32;
    }

    static __device__ __forceinline__ void set_pair(symmem_u32 (&words)[W], int i, symmem_u64 bits) {
        words[i % W] = (symmem_u32)bits;
        words[(i + 1) % W] = (symmem_u32)(bits >> 32);
    }

    static __device__ __forceinline__ void get(const symmem_u32 (&words)[W], int i, WideBits &bits) {
        bits = {pair(words, 4 * i), pair(words, 4 * i + 2)};
    }

    static __device__ __forceinline__ void get(const symmem_u32 (&words)[W], int i, symmem_u64 &bits) {
        const int per_word = 4 / (Number::BYTES < 4 ? Number::BYTES : 4);
        symmem_u32 word = words[i / per_word % W];
        if (Number::BYTES == 8) {
            bits = pair(words, 2 * i);
        } else if (Number::BYTES == 4) {
            bits = word;
        } else {
            bits = word >> (8 * Number::BYTES * (i % per_word)) & ((1u << (8 * Number::BYTES % 32)) - 1);
        }
    }

    static __device__ __forceinline__ void put(symmem_u32 (&words)[W], int i, WideBits bits) {
        set_pair(words, 4 * i, bits.low);
        set_pair(words, 4 * i + 2, bits.high);
    }

    // Into words that are 0.
    static __device__ __forceinline__ void put(symmem_u32 (&words)[W], int i, symmem_u64 bits) {
        const int per_word = 4 / (Number::BYTES < 4 ? Number::BYTES : 4);
        if (Number::BYTES == 8) {
            set_pair(words, 2 * i, bits);
        } else if (Number::BYTES == 4) {
            words[i % W] = (symmem_u32)bits;
        } else {
            symmem_u32 kept = (symmem_u32)bits & ((1u << (8 * Number::BYTES % 32)) - 1);
            words[i / per_word % W] |= kept << (8 * Number::BYTES * (i % per_word));
        }
    }

    static __device__ __forceinline__ Number::Wide lane(const symmem_u32 (&words)[W], int i) {
        ElementBits bits;
        get(words, i, bits);
        return Number::widen(bits);
    }

    __device__ __forceinline__ void set(const symmem_u32 (&words)[W]) {
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            lanes[i] = lane(words, i);
        }
    }

    template <class F> __device__ __forceinline__ void each(const symmem_u32 (&words)[W], F f) {
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            lanes[i] = f(lanes[i], lane(words, i));
        }
    }

    __device__ __forceinline__ void add(const symmem_u32 (&words)[W]) {
        each(words, [](Number::Wide a, Number::Wide b) { return Number::add(a, b); });
    }

    // One more rank's elements, by any operator.
    __device__ __forceinline__ void take(const symmem_u32 (&words)[W], Op op) {
        typedef Number::Wide Wide;
        if (op <= AVERAGE) {
            add(words);
        } else if (op == PRODUCT) {
            each(words, [](Wide a, Wide b) { return Number::multiply(a, b); });
        } else if (op == MIN) {
            each(words, [](Wide a, Wide b) { return Number::min(a, b); });
        } else if (op == MAX) {
            each(words, [](Wide a, Wide b) { return Number::max(a, b); });
        } else {
            each(words, [op](Wide a, Wide b) { return Number::bits(op, a, b); });
        }
    }

    // N: the number of ranks where it is known and a power of two, else 0.
    template <int N>
    __device__ __forceinline__ void finish(symmem_u32 (&words)[W], Op op, symmem_u32 ranks) {
        if (op == AVERAGE) {
#pragma unroll
            for (int i = 0; i < LANES; i++) {
                if constexpr (N != 0) {
                    lanes[i] = Number::template divide<N>(lanes[i]);
                } else {
                    lanes[i] = Number::divide(lanes[i], ranks);
                }
            }
        }
#pragma unroll
        for (int w = 0; w < W; w++) {
            words[w] = 0;
        }
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            put(words, i, Number::narrow(lanes[i]));
        }
    }
};
