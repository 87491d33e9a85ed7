//! Arithmetic on every element type, written without branches so that compilers turn it into vector code,
//! and with one result for each input whatever code they make of it.
#![allow(unsafe_code)] // instructions that the processor was asked for before; no S-invariant

use std::fmt::Debug;

use half::{bf16, f16};
use num_complex::Complex;

#[cfg(target_arch = "x86_64")]
use super::x86::{avx512, f16c};
use super::{Bool, Element, F8E4M3, F8E5M2};

/// What conversions are compiled for: one of these instruction sets, with those before it.
pub const PORTABLE: u8 = 0;
/// With F16C.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub const AVX2: u8 = 1;
/// F, BW, VL and DQ.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub const AVX512: u8 = 2;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub const AVX512_BF16: u8 = 3;

/// Functions of two numbers, each by an expression.
macro_rules! of_two {
    ($type:ty: $($name:ident($a:ident, $b:ident) $value:expr;)*) => {$(
        #[inline(always)]
        fn $name($a: $type, $b: $type) -> $type { $value }
    )*};
}

/// An element type that can be reduced: all of the library's own.
pub trait Number: Element + Arithmetic + PartialEq + Debug {}

impl<T: Element + Arithmetic + PartialEq + Debug> Number for T {}

/// An element type with the type that reductions of it are computed in. Out of reach of other crates, which cannot have
/// the library reduce types of their own.
///
/// Operators that do not apply to a type are refused before anything is computed, so their methods may do anything.
pub trait Arithmetic: Copy + 'static {
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn multiply(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn divide(a: Self::Wide, ranks: usize) -> Self::Wide;
    of_two! { Self::Wide: min(a, _b) a; max(a, _b) a; and(a, _b) a; or(a, _b) a; xor(a, _b) a; }

    /// The last instruction set that makes conversions of this type faster.
    const FASTEST: u8 = AVX512;

    /// As `widen`, of many, by the processor's own means where it has any, and in an order that suits it:
    /// `narrow_fast` undoes that order.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn widen_fast<const L: usize, const V: u8>(narrow: [Self; L]) -> [Self::Wide; L] {
        narrow.map(Self::widen)
    }

    /// As `narrow`, likewise.
    ///
    /// # Safety
    /// As `widen_fast`.
    #[inline(always)]
    unsafe fn narrow_fast<const L: usize, const V: u8>(wide: [Self::Wide; L]) -> [Self; L] {
        wide.map(Self::narrow)
    }
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Arithmetic for $type {
            type Wide = $type;
            #[inline(always)]
            fn widen(self) -> $type { self }
            #[inline(always)]
            fn narrow(wide: $type) -> $type { wide }
            of_two! { $type:
                add(a, b) a.wrapping_add(b);
                multiply(a, b) a.wrapping_mul(b);
                min(a, b) Ord::min(a, b);
                max(a, b) Ord::max(a, b);
                and(a, b) a & b;
                or(a, b) a | b;
                xor(a, b) a ^ b;
            }
            #[inline(always)]
            fn divide(a: $type, ranks: usize) -> $type {
                match <$type>::try_from(ranks.max(1)) {
                    Ok(ranks) => a.wrapping_div(ranks),
                    // More ranks than the type can count; the quotient fits again.
                    Err(_) => (a as i128 / ranks as i128) as $type,
                }
            }
        }
    )*};
}

integers!(i8, i16, i32, i64, isize, u8, u16, u32, u64, usize);

macro_rules! floats {
    ($($type:ty, $wide:ty, |$x:ident| $widen:expr, |$w:ident| $narrow:expr, {$($fast:item)*};)*) => {$(
        impl Arithmetic for $type {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide { let $x = self; $widen }
            #[inline(always)]
            fn narrow($w: $wide) -> Self { $narrow }
            of_two! { $wide: add(a, b) a + b; multiply(a, b) a * b; }
            #[inline(always)]
            fn min(a: $wide, b: $wide) -> $wide {
                // Equal values differ at most in the sign of zero.
                let equal = <$wide>::from_bits(a.to_bits() | b.to_bits());
                let number = if a < b { a } else if b < a { b } else { equal };
                if a.is_nan() || b.is_nan() { <$wide>::NAN } else { number }
            }
            #[inline(always)]
            fn max(a: $wide, b: $wide) -> $wide {
                let equal = <$wide>::from_bits(a.to_bits() & b.to_bits());
                let number = if a > b { a } else if b > a { b } else { equal };
                if a.is_nan() || b.is_nan() { <$wide>::NAN } else { number }
            }
            #[inline(always)]
            fn divide(a: $wide, ranks: usize) -> $wide { a / ranks as $wide }
            $($fast)*
        }
    )*};
}

floats! {
    f64, f64, |x| x, |w| if w.is_nan() { f64::NAN } else { w }, {};
    f32, f32, |x| x, |w| if w.is_nan() { f32::NAN } else { w }, {};
    bf16, f32, |x| f32::from_bits(u32::from(x.to_bits()) << 16), |w| bf16::from_bits(to_bf16(w)), {
        const FASTEST: u8 = AVX512_BF16;

        // Those at even places in the first half, those at odd ones in the second: each is half of a 32-bit word, so
        // that one shift or mask widens it, and no element changes its lane.
        #[cfg(target_endian = "little")]
        #[inline(always)]
        unsafe fn widen_fast<const L: usize, const V: u8>(narrow: [Self; L]) -> [f32; L] {
            if V == PORTABLE {
                return narrow.map(Self::widen);
            }
            let mut wide = [0.0; L];
            let (even, odd) = wide.split_at_mut(L / 2);
            for ((pair, even), odd) in narrow.chunks_exact(2).zip(even).zip(odd) {
                // SAFETY: a pair is a word; it may lie at any address.
                let word = unsafe { pair.as_ptr().cast::<u32>().read_unaligned() };
                (*even, *odd) = (f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000));
            }
            wide
        }

        #[cfg(target_endian = "little")]
        #[inline(always)]
        unsafe fn narrow_fast<const L: usize, const V: u8>(wide: [f32; L]) -> [Self; L] {
            match V {
                PORTABLE => wide.map(Self::narrow),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as `V` says.
                AVX512_BF16 if L.is_multiple_of(32) => unsafe { avx512::narrow(wide) },
                _ => interleaved(wide),
            }
        }
    };
    f16, f32, |x| decode::<10, 15>(u32::from(x.to_bits())), |w| f16::from_bits(encode::<10, 15>(w) as u16), {
        // More at once are converted no faster, and vectors of both sizes have to be joined.
        const FASTEST: u8 = AVX2;

        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        unsafe fn widen_fast<const L: usize, const V: u8>(narrow: [Self; L]) -> [f32; L] {
            match V {
                PORTABLE => narrow.map(Self::widen),
                // SAFETY: as `V` says.
                _ => unsafe { f16c::widen(narrow) },
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        unsafe fn narrow_fast<const L: usize, const V: u8>(wide: [f32; L]) -> [Self; L] {
            match V {
                PORTABLE => wide.map(Self::narrow),
                // SAFETY: as `V` says.
                _ => unsafe { f16c::narrow(wide) },
            }
        }
    };
    F8E5M2, f32, |x| decode::<2, 15>(u32::from(x.0)), |w| F8E5M2(encode::<2, 15>(w) as u8), {};
    F8E4M3, f32, |x| decode_e4m3(u32::from(x.0)), |w| F8E4M3(encode_e4m3(w) as u8), {};
}

impl Arithmetic for Bool {
    /// 0 or 1.
    type Wide = u8;
    #[inline(always)]
    fn widen(self) -> u8 {
        bool::from(self).into()
    }
    #[inline(always)]
    fn narrow(wide: u8) -> Self {
        Self::from(wide != 0)
    }
    of_two! { u8:
        add(a, b) a | b;
        multiply(a, b) a & b;
        min(a, b) a & b;
        max(a, b) a | b;
        and(a, b) a & b;
        or(a, b) a | b;
        xor(a, b) a ^ b;
    }
    #[inline(always)]
    fn divide(a: u8, _ranks: usize) -> u8 {
        a
    }
}

macro_rules! complex {
    ($($part:ty),*) => {$(
        impl Arithmetic for Complex<$part> {
            type Wide = Self;
            #[inline(always)]
            fn widen(self) -> Self { self }
            #[inline(always)]
            fn narrow(wide: Self) -> Self {
                Self::new(<$part>::narrow(wide.re), <$part>::narrow(wide.im))
            }
            #[inline(always)]
            fn add(a: Self, b: Self) -> Self { Self::new(a.re + b.re, a.im + b.im) }
            /// Each product and each sum is rounded, as in the kernels.
            #[inline(always)]
            fn multiply(a: Self, b: Self) -> Self {
                Self::new(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)
            }
            #[inline(always)]
            fn divide(a: Self, ranks: usize) -> Self {
                Self::new(a.re / ranks as $part, a.im / ranks as $part)
            }
        }
    )*};
}

complex!(f32, f64);

#[inline(always)]
fn to_bf16(x: f32) -> u16 {
    (rounded_to_bf16(x) >> 16) as u16
}

/// Those of the first half to even places, those of the second to odd ones.
#[cfg(target_endian = "little")]
#[inline(always)]
pub(super) fn interleaved<const L: usize>(wide: [f32; L]) -> [bf16; L] {
    let mut narrow = [bf16::ZERO; L];
    let (even, odd) = wide.split_at(L / 2);
    for ((pair, even), odd) in narrow.chunks_exact_mut(2).zip(even).zip(odd) {
        let word = rounded_to_bf16(*even) >> 16 | rounded_to_bf16(*odd) & 0xffff_0000;
        // SAFETY: a pair is a word; it may lie at any address.
        unsafe { pair.as_mut_ptr().cast::<u32>().write_unaligned(word) };
    }
    narrow
}

/// In the upper half; what the lower one has does not count.
#[inline(always)]
fn rounded_to_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)); // to nearest, ties to even
    if x.is_nan() { 0x7fc0_0000 } else { rounded }
}

/// A float of `M` mantissa bits and exponent bias `B`, with infinities and NaNs as IEEE 754 has them.
#[inline(always)]
fn decode<const M: u32, const B: u32>(bits: u32) -> f32 {
    let width = 32 - (2 * B + 1).leading_zeros() + M; // all but the sign
    let magnitude = bits & ((1 << width) - 1);
    let sign = (bits >> width) << 31;
    let shifted = magnitude << (23 - M);
    let rebias = (127 - B) << 23;
    let normal = shifted + rebias;
    let special = normal + rebias;
    let tiny = f32::from_bits(shifted + rebias + (1 << 23)) - f32::from_bits(rebias + (1 << 23));
    let exponent = magnitude >> M;
    let number = if exponent == 2 * B + 1 { special } else { normal };
    let number = if exponent == 0 { tiny.to_bits() } else { number };
    f32::from_bits(number | sign)
}

/// The inverse of `decode`: to nearest, ties to even; too large is infinite; every NaN is the same one.
#[inline(always)]
fn encode<const M: u32, const B: u32>(x: f32) -> u32 {
    let width = 32 - (2 * B + 1).leading_zeros() + M;
    let infinity = (2 * B + 1) << M;
    let (magnitude, sign) = (x.to_bits() & 0x7fff_ffff, (x.to_bits() >> 31) << width);
    let finite = round::<M, B>(magnitude);
    let number = if magnitude >= (127 + B + 1) << 23 { infinity } else { finite };
    if x.is_nan() { infinity | 1 << (M - 1) } else { number | sign }
}

/// Without infinities: one more binade of numbers, and a single NaN, that stands for what is too large as well.
#[inline(always)]
fn decode_e4m3(bits: u32) -> f32 {
    let number = decode::<3, 7>(bits);
    let magnitude = bits & 0x7f;
    let sign = (bits >> 7) << 31;
    let top = f32::from_bits(((magnitude << 20) + (120 << 23)) | sign);
    let number = if magnitude >> 3 == 15 { top } else { number };
    if magnitude == 0x7f { f32::NAN } else { number }
}

#[inline(always)]
fn encode_e4m3(x: f32) -> u32 {
    let (magnitude, sign) = (x.to_bits() & 0x7fff_ffff, (x.to_bits() >> 31) << 7);
    let rounded = round::<3, 7>(magnitude);
    let too_large = rounded > 0x7e || magnitude >= (127 + 9) << 23;
    if x.is_nan() || too_large { 0x7f } else { rounded | sign }
}

/// The magnitude of a finite f32 in fewer bits.
#[inline(always)]
fn round<const M: u32, const B: u32>(magnitude: u32) -> u32 {
    let shift = 23 - M;
    let odd = (magnitude >> shift) & 1;
    let half = (1 << (shift - 1)) - 1;
    let normal = magnitude.wrapping_sub((127 - B) << 23).wrapping_add(half + odd) >> shift;
    // Below the normal numbers an addition aligns the bits, and rounds as additions do.
    let align = (127 + 24 - B - M) << 23;
    let tiny = (f32::from_bits(magnitude) + f32::from_bits(align)).to_bits().wrapping_sub(align);
    if magnitude < (127 - B + 1) << 23 { tiny } else { normal }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_conversions_are_those_of_ieee_754_for_every_value() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            if x.is_nan() {
                assert!(x.widen().is_nan());
                assert_eq!(f16::narrow(x.widen()).to_bits(), 0x7e00);
            } else {
                assert_eq!(x.widen().to_bits(), x.to_f32().to_bits(), "{bits:#x}");
                assert_eq!(f16::narrow(x.widen()).to_bits(), bits);
            }
        }
    }

    /// Values around every rounding boundary of a type with `step` distinct magnitudes.
    fn around(values: impl Iterator<Item = f32>) -> impl Iterator<Item = f32> {
        values.flat_map(|v| {
            let bits = v.to_bits();
            (-2..=2).map(move |d| f32::from_bits(bits.wrapping_add_signed(d)))
        })
    }

    #[test]
    fn f16_and_bf16_round_to_nearest_even_between_all_neighbours() {
        for bits in 0..0x7c00_u16 {
            let (low, high) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
            let middle = if high.is_finite() { low / 2.0 + high / 2.0 } else { 65520.0 };
            for x in around([low, middle].into_iter()).filter(|x| x.is_finite()) {
                assert_eq!(f16::narrow(x).to_bits(), f16::from_f32(x).to_bits(), "{x:e}");
                assert_eq!(f16::narrow(-x).to_bits(), f16::from_f32(-x).to_bits(), "-{x:e}");
            }
        }
        for bits in (0..0x7f80_u16).step_by(7) {
            let low = bf16::from_bits(bits).to_f32();
            let middle = f32::from_bits(low.to_bits() + 0x8000);
            for x in around([low, middle].into_iter()).filter(|x| x.is_finite()) {
                assert_eq!(bf16::narrow(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
        assert_eq!(bf16::narrow(f32::INFINITY).to_bits(), 0x7f80);
        assert_eq!(bf16::narrow(f32::from_bits(0x7f80_0001)).to_bits(), 0x7fc0);
    }

    /// The value of an 8-bit float, by its definition.
    fn by_definition(bits: u8, mantissa: i32, bias: i32) -> f32 {
        let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(bits & 0x7f) >> mantissa;
        let fraction = (i32::from(bits) & ((1 << mantissa) - 1)) as f32 / (1 << mantissa) as f32;
        match exponent {
            0 => sign * fraction * 2f32.powi(1 - bias),
            e => sign * (1.0 + fraction) * 2f32.powi(e - bias),
        }
    }

    #[test]
    fn eight_bit_floats_are_what_their_definition_says() {
        for bits in 0..=u8::MAX {
            let e4m3 = F8E4M3(bits);
            if bits & 0x7f == 0x7f {
                assert!(e4m3.widen().is_nan());
            } else {
                assert_eq!(
                    e4m3.widen().to_bits(),
                    by_definition(bits, 3, 7).to_bits(),
                    "e4m3 {bits:#x}"
                );
                assert_eq!(F8E4M3::narrow(e4m3.widen()).0, bits);
            }
            let e5m2 = F8E5M2(bits);
            match bits & 0x7f {
                0x7c => assert!(e5m2.widen().is_infinite()),
                m if m > 0x7c => assert!(e5m2.widen().is_nan()),
                _ => {
                    assert_eq!(
                        e5m2.widen().to_bits(),
                        by_definition(bits, 2, 15).to_bits(),
                        "e5m2 {bits:#x}"
                    );
                    assert_eq!(F8E5M2::narrow(e5m2.widen()).0, bits);
                }
            }
        }
    }

    #[test]
    fn eight_bit_floats_round_to_nearest_even() {
        fn check<T: Number<Wide = f32>>(
            largest: u8,
            value: impl Fn(u8) -> f32,
            bits: impl Fn(T) -> u8,
        ) {
            for low in 0..largest {
                let (a, b) = (value(low), value(low + 1));
                let middle = (a + b) / 2.0;
                let even = if low % 2 == 0 { low } else { low + 1 };
                assert_eq!(bits(T::narrow(middle)), even, "{middle:e}");
                assert_eq!(bits(T::narrow(f32::from_bits(middle.to_bits() - 1))), low);
                assert_eq!(bits(T::narrow(f32::from_bits(middle.to_bits() + 1))), low + 1);
            }
        }
        check::<F8E4M3>(0x7e, |b| by_definition(b, 3, 7), |x| x.0);
        check::<F8E5M2>(0x7b, |b| by_definition(b, 2, 15), |x| x.0);
        assert_eq!(F8E4M3::narrow(464.0).0, 0x7e, "a tie goes to the even 448");
        assert_eq!(F8E4M3::narrow(464.1).0, 0x7f);
        assert_eq!(F8E4M3::narrow(f32::INFINITY).0, 0x7f);
        assert_eq!(F8E5M2::narrow(61440.0).0, 0x7c);
        assert_eq!(F8E5M2::narrow(-1e30).0, 0xfc);
    }

    #[test]
    fn min_and_max_know_signed_zeros_and_pass_nan_on() {
        assert_eq!(f32::min(-0.0, 0.0).to_bits() >> 31, 1);
        assert_eq!(<f32 as Arithmetic>::min(0.0, -0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(<f32 as Arithmetic>::max(-0.0, 0.0).to_bits(), 0.0f32.to_bits());
        assert_eq!(<f32 as Arithmetic>::min(1.0, 2.0), 1.0);
        assert_eq!(<f32 as Arithmetic>::max(-1.0, -2.0), -1.0);
        assert!(<f32 as Arithmetic>::min(f32::NAN, 1.0).is_nan());
        assert!(<f32 as Arithmetic>::max(1.0, f32::NAN).is_nan());
    }

    #[test]
    fn integers_wrap_and_averages_go_towards_zero() {
        assert_eq!(<u8 as Arithmetic>::add(200, 100), 44);
        assert_eq!(<i8 as Arithmetic>::multiply(100, 2), -56);
        assert_eq!(<i32 as Arithmetic>::divide(-7, 2), -3);
        assert_eq!(<i8 as Arithmetic>::divide(100, 300), 0);
        assert_eq!(<i8 as Arithmetic>::divide(-128, 128), -1);
    }
}
