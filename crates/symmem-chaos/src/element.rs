//! What every rank has at every place of every call, and what a reduction of it is, by the plain definition.
//!
//! Nothing here is taken from the library: the arithmetic is written again, in slow code, from the documentation.

use half::{bf16, f16};
use symmem::{Bool, Complex, F8E4M3, F8E5M2, Number, ReduceOp};

/// One step of splitmix64.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// From which all elements of one rank in one call are made.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Of the program.
    pub seed: u64,
    /// The call's number in the program.
    pub call: u64,
}

impl Source {
    /// The bits for element `i` of world rank `rank`.
    fn bits(self, rank: usize, i: usize) -> u64 {
        let base = mix(self.seed ^ self.call << 40 ^ (rank as u64) << 56);
        mix(base.wrapping_add(i as u64))
    }

    /// `len` elements of world rank `rank`.
    pub fn elements<T: Plain>(self, rank: usize, len: usize) -> Vec<T> {
        (0..len).map(|i| T::random(self.bits(rank, i))).collect()
    }

    /// Element `i` of the reduction over `ranks`, in their order.
    pub fn reduced<T: Plain>(self, ranks: &[usize], op: ReduceOp, i: usize) -> T {
        let one = |rank: &usize| T::random(self.bits(*rank, i)).wide();
        let mut values = ranks.iter().map(one);
        let first = values.next().unwrap_or_default();
        let sum = values.fold(first, |a, b| T::combine(op, a, b));
        let whole = if op == ReduceOp::Average { T::parted(sum, ranks.len()) } else { sum };
        T::rounded(whole)
    }
}

/// An element type with arithmetic of our own.
pub trait Plain: Number + PartialEq + std::fmt::Debug {
    /// What reductions are computed in.
    type Sum: Copy + Default;
    /// A number without surprises: no NaN, nothing that overflows where a few are added.
    fn random(bits: u64) -> Self;
    /// In the type of the computation.
    fn wide(self) -> Self::Sum;
    /// Rounded once, at the end.
    fn rounded(wide: Self::Sum) -> Self;
    /// One step of the reduction.
    fn combine(op: ReduceOp, a: Self::Sum, b: Self::Sum) -> Self::Sum;
    /// By a number of ranks.
    fn parted(a: Self::Sum, ranks: usize) -> Self::Sum;
    /// To compare and to show: numbers that are equal may differ in their bits.
    fn raw(self) -> u64;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Plain for $type {
            type Sum = $type;
            fn random(bits: u64) -> Self { bits as $type }
            fn wide(self) -> $type { self }
            fn rounded(wide: $type) -> Self { wide }
            fn combine(op: ReduceOp, a: $type, b: $type) -> $type {
                match op {
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::And => a & b,
                    ReduceOp::Or => a | b,
                    ReduceOp::Xor => a ^ b,
                    _ => a.wrapping_add(b),
                }
            }
            fn parted(a: $type, ranks: usize) -> $type { a / ranks as $type }
            fn raw(self) -> u64 { self as u64 }
        }
    )*};
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! floats {
    ($($type:ty, $wide:ty, $random:expr, $widen:expr, $narrow:expr, $raw:expr;)*) => {$(
        impl Plain for $type {
            type Sum = $wide;
            fn random(bits: u64) -> Self { ($random)(bits) }
            fn wide(self) -> $wide { ($widen)(self) }
            fn rounded(wide: $wide) -> Self { ($narrow)(wide) }
            fn combine(op: ReduceOp, a: $wide, b: $wide) -> $wide {
                match op {
                    ReduceOp::Product => a * b,
                    // Zero has two signs, and minus is the lower one.
                    ReduceOp::Min if a == b => if a.is_sign_negative() { a } else { b },
                    ReduceOp::Max if a == b => if a.is_sign_negative() { b } else { a },
                    ReduceOp::Min => if a < b { a } else { b },
                    ReduceOp::Max => if a > b { a } else { b },
                    _ => a + b,
                }
            }
            fn parted(a: $wide, ranks: usize) -> $wide { a / ranks as $wide }
            fn raw(self) -> u64 { ($raw)(self) }
        }
    )*};
}

floats! {
    f64, f64, fraction, |x| x, |w| w, |x: f64| x.to_bits();
    f32, f32, |b| fraction(b) as f32, |x| x, |w| w, |x: f32| u64::from(x.to_bits());
    f16, f32, |b| f16::from_f64(fraction(b)), |x: f16| x.to_f32(), f16::from_f32, |x: f16| u64::from(x.to_bits());
    bf16, f32, |b| bf16::from_f64(fraction(b)), |x: bf16| x.to_f32(), bf16::from_f32, |x: bf16| u64::from(x.to_bits());
    F8E4M3, f32, |b| F8E4M3(eighth(b)), |x: F8E4M3| small(x.0, 3, 7), |w| F8E4M3(nearest(w, 3, 7)), |x: F8E4M3| u64::from(x.0);
    F8E5M2, f32, |b| F8E5M2(eighth(b)), |x: F8E5M2| small(x.0, 2, 15), |w| F8E5M2(nearest(w, 2, 15)), |x: F8E5M2| u64::from(x.0);
}

impl Plain for Bool {
    type Sum = bool;
    fn random(bits: u64) -> Self {
        Self::from(bits & 1 == 1)
    }
    fn wide(self) -> bool {
        self.into()
    }
    fn rounded(wide: bool) -> Self {
        wide.into()
    }
    fn combine(op: ReduceOp, a: bool, b: bool) -> bool {
        match op {
            ReduceOp::Product | ReduceOp::Min | ReduceOp::And => a && b,
            ReduceOp::Xor => a != b,
            _ => a || b,
        }
    }
    fn parted(a: bool, _ranks: usize) -> bool {
        a
    }
    fn raw(self) -> u64 {
        bool::from(self).into()
    }
}

macro_rules! complex {
    ($($part:ty),*) => {$(
        impl Plain for Complex<$part> {
            type Sum = Self;
            fn random(bits: u64) -> Self {
                Self::new(fraction(bits) as $part, fraction(mix(bits)) as $part)
            }
            fn wide(self) -> Self { self }
            fn rounded(wide: Self) -> Self { wide }
            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                if op == ReduceOp::Product { a * b } else { a + b }
            }
            fn parted(a: Self, ranks: usize) -> Self {
                Self::new(a.re / ranks as $part, a.im / ranks as $part)
            }
            fn raw(self) -> u64 {
                mix(self.re.to_bits().into()) ^ u64::from(self.im.to_bits())
            }
        }
    )*};
}

complex!(f32, f64);

/// Between -8 and 8, of every size down to small ones, and now and then a small integer or a zero.
fn fraction(bits: u64) -> f64 {
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    let part = (bits >> 12) as f64 / (1_u64 << 52) as f64;
    sign * match bits >> 1 & 7 {
        0 => (bits >> 12 & 7) as f64,
        1 => part / 1024.0,
        2 | 3 => part,
        _ => part * 8.0,
    }
}

/// Bits of an 8-bit float whose exponent is below the upper third: sums and products of six stay finite.
fn eighth(bits: u64) -> u8 {
    let magnitude = (bits >> 8) as u8 % 0x40;
    magnitude | (bits as u8 & 0x80)
}

/// The number of an 8-bit float that is finite: `mantissa` bits and an exponent with this bias.
fn small(bits: u8, mantissa: u32, bias: i32) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((bits & 0x7f) >> mantissa);
    let fraction = f32::from(bits & ((1 << mantissa) - 1)) / f32::from(1_u8 << mantissa);
    let power = |e: i32| (e as f32).exp2();
    let magnitude = if exponent == 0 {
        fraction * power(1 - bias)
    } else {
        (1.0 + fraction) * power(exponent - bias)
    };
    sign * magnitude
}

/// The 8-bit float that is nearest, the even one of two; by bisection over all magnitudes below the special ones.
fn nearest(x: f32, mantissa: u32, bias: i32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = x.abs();
    let last: u8 = if mantissa == 3 { 0x7e } else { 0x7b };
    let (mut below, mut above) = (0_u8, last);
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        if small(middle, mantissa, bias) <= magnitude { below = middle } else { above = middle }
    }
    let (low, high) = (small(below, mantissa, bias), small(above, mantissa, bias));
    let up = match (magnitude - low).total_cmp(&(high - magnitude)) {
        std::cmp::Ordering::Less => below,
        std::cmp::Ordering::Greater => above,
        std::cmp::Ordering::Equal => {
            if below % 2 == 0 {
                below
            } else {
                above
            }
        }
    };
    sign | up
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_round_to_nearest_even() {
        for bits in 0..0x7c_u8 {
            for mantissa in [2, 3] {
                let bias = if mantissa == 3 { 7 } else { 15 };
                if mantissa == 2 && bits >= 0x7b {
                    continue;
                }
                let (low, high) = (small(bits, mantissa, bias), small(bits + 1, mantissa, bias));
                assert_eq!(nearest(low, mantissa, bias), bits);
                let even = if bits % 2 == 0 { bits } else { bits + 1 };
                assert_eq!(nearest((low + high) / 2.0, mantissa, bias), even);
            }
        }
        assert_eq!(small(0x38, 3, 7), 1.0);
        assert_eq!(small(0x3c, 2, 15), 1.0);
    }

    #[test]
    fn elements_differ_between_calls_and_ranks() {
        let a = Source { seed: 1, call: 1 }.elements::<u64>(0, 4);
        assert_ne!(a, Source { seed: 1, call: 2 }.elements::<u64>(0, 4));
        assert_ne!(a, Source { seed: 1, call: 1 }.elements::<u64>(1, 4));
    }
}
