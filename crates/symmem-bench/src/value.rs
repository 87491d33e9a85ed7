//! The types of elements that can be measured, and small numbers of each that add up exactly.

use half::{bf16, f16};
use symmem::Number;

/// Their names, for `--dtype`.
pub(super) const DTYPES: [&str; 8] = ["f32", "f64", "bf16", "f16", "i32", "i64", "u32", "u8"];

/// An element that stands for a small number.
pub(super) trait Value: Number + PartialEq {
    /// What the floor adds in its place: the same bytes, and whatever addition the processor has for them.
    type Lane: Lane;
    /// Whether that is the same as adding the values.
    const EXACT: bool;

    fn of(number: u8) -> Self;

    /// Of any sign and size, so that a sum is rounded.
    fn sample(bits: u64) -> Self;
}

/// What the processor adds without converting.
pub(super) trait Lane: Copy {
    fn plus(self, other: Self) -> Self;
}

macro_rules! lanes {
    ($($type:ty: $plus:expr),*) => {
        $(impl Lane for $type {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                let plus: fn(Self, Self) -> Self = $plus;
                plus(self, other)
            }
        })*
    };
}

lanes!(f32: |a, b| a + b, f64: |a, b| a + b, u8: u8::wrapping_add, u16: u16::wrapping_add);
lanes!(u32: u32::wrapping_add, u64: u64::wrapping_add);

macro_rules! values {
    ($($type:ty as $lane:ty, $exact:expr, $of:expr, $sample:expr);*) => {
        $(impl Value for $type {
            type Lane = $lane;
            const EXACT: bool = $exact;
            fn of(number: u8) -> Self {
                let of: fn(u8) -> Self = $of;
                of(number)
            }
            fn sample(bits: u64) -> Self {
                let sample: fn(u64) -> Self = $sample;
                sample(bits)
            }
        })*
    };
}

values!(f32 as f32, true, f32::from, float; f64 as f64, true, f64::from, |x| f64::from(float(x)) / 3.0);
values!(i32 as u32, true, i32::from, |x| x as Self; i64 as u64, true, i64::from, |x| x as Self);
values!(u32 as u32, true, u32::from, |x| x as Self; u8 as u8, true, |n| n, |x| x as Self);
values!(bf16 as u16, false, |n| Self::from_f32(n.into()), |x| Self::from_f32(float(x)));
values!(f16 as u16, false, |n| Self::from_f32(n.into()), |x| Self::from_f32(float(x)));

/// Of either sign, between 2⁻⁷ and 2.
fn float(bits: u64) -> f32 {
    f32::from_bits((bits as u32 & 0x83ff_ffff) | 0x3c00_0000)
}

/// The expression, with its placeholder for the type of this name.
macro_rules! with_dtype {
    ($name:expr, $type:ident => $body:expr) => {{
        macro_rules! of {
            ($one:ty) => {{
                type $type = $one;
                $body
            }};
        }
        match $name {
            "f32" => of!(f32),
            "f64" => of!(f64),
            "bf16" => of!(half::bf16),
            "f16" => of!(half::f16),
            "i32" => of!(i32),
            "i64" => of!(i64),
            "u32" => of!(u32),
            _ => of!(u8),
        }
    }};
}
pub(super) use with_dtype;

/// Bytes of an element of the type of this name.
pub(super) fn size_of(name: &str) -> usize {
    with_dtype!(name, T => std::mem::size_of::<T>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adds<T: Value + std::ops::Add<Output = T>>() {
        assert!(T::of(3) + T::of(4) == T::of(7) && T::of(1) != T::of(2));
    }

    #[test]
    fn small_numbers_add_up() {
        adds::<f32>();
        adds::<bf16>();
        adds::<f16>();
        adds::<u8>();
        assert_eq!(DTYPES.map(size_of), [4, 8, 2, 2, 4, 8, 4, 1]);
    }
}
