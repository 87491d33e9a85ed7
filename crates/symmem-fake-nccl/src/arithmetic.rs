//! Reductions of bytes as numbers, in rank order.

use half::{bf16, f16};

/// Bytes of an element of a `ncclDataType_t`.
pub(crate) fn size(kind: i32) -> usize {
    match kind {
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        6 | 9 => 2,
        _ => 1,
    }
}

/// Everyone's elements in one; nothing for types that this does not reckon with.
pub(crate) fn reduce(
    kind: i32,
    op: i32,
    inputs: &[Vec<u8>],
    factors: &[Option<f64>],
) -> Option<Vec<u8>> {
    match kind {
        0 => Some(of::<i8, 1>(op, inputs, factors)),
        1 => Some(of::<u8, 1>(op, inputs, factors)),
        2 => Some(of::<i32, 4>(op, inputs, factors)),
        3 => Some(of::<u32, 4>(op, inputs, factors)),
        4 => Some(of::<i64, 8>(op, inputs, factors)),
        5 => Some(of::<u64, 8>(op, inputs, factors)),
        6 => Some(of::<f16, 2>(op, inputs, factors)),
        7 => Some(of::<f32, 4>(op, inputs, factors)),
        8 => Some(of::<f64, 8>(op, inputs, factors)),
        9 => Some(of::<bf16, 2>(op, inputs, factors)),
        _ => None,
    }
}

trait Number<const BYTES: usize>: Copy {
    fn from_bytes(bytes: [u8; BYTES]) -> Self;
    fn bytes(self) -> [u8; BYTES];
    fn combine(self, op: i32, other: Self) -> Self;
    /// Multiplied with a factor, or divided by a number of ranks.
    fn scaled(self, factor: f64) -> Self;
    fn divided(self, ranks: usize) -> Self;
}

macro_rules! integers {
    ($($type:ty: $bytes:literal),*) => {$(
        impl Number<$bytes> for $type {
            fn from_bytes(bytes: [u8; $bytes]) -> Self {
                Self::from_ne_bytes(bytes)
            }
            fn bytes(self) -> [u8; $bytes] {
                self.to_ne_bytes()
            }
            fn combine(self, op: i32, other: Self) -> Self {
                match op {
                    1 => self.wrapping_mul(other),
                    2 => self.max(other),
                    3 => self.min(other),
                    _ => self.wrapping_add(other),
                }
            }
            fn scaled(self, factor: f64) -> Self {
                self.wrapping_mul(factor as Self)
            }
            fn divided(self, ranks: usize) -> Self {
                self / ranks as Self
            }
        }
    )*};
}

integers!(i8: 1, u8: 1, i32: 4, u32: 4, i64: 8, u64: 8);

macro_rules! floats {
    ($($type:ty: $bytes:literal),*) => {$(
        impl Number<$bytes> for $type {
            fn from_bytes(bytes: [u8; $bytes]) -> Self {
                Self::from_ne_bytes(bytes)
            }
            fn bytes(self) -> [u8; $bytes] {
                self.to_ne_bytes()
            }
            fn combine(self, op: i32, other: Self) -> Self {
                match op {
                    1 => self * other,
                    2 => if other > self { other } else { self },
                    3 => if other < self { other } else { self },
                    _ => self + other,
                }
            }
            fn scaled(self, factor: f64) -> Self {
                self.divide_or_multiply(|x| x * factor)
            }
            fn divided(self, ranks: usize) -> Self {
                self.divide_or_multiply(|x| x / ranks as f64)
            }
        }
    )*};
}

trait Wide: Sized {
    fn divide_or_multiply(self, f: impl Fn(f64) -> f64) -> Self;
}

impl Wide for f64 {
    fn divide_or_multiply(self, f: impl Fn(f64) -> f64) -> Self {
        f(self)
    }
}
impl Wide for f32 {
    fn divide_or_multiply(self, f: impl Fn(f64) -> f64) -> Self {
        f(f64::from(self)) as Self
    }
}
impl Wide for f16 {
    fn divide_or_multiply(self, f: impl Fn(f64) -> f64) -> Self {
        Self::from_f64(f(self.to_f64()))
    }
}
impl Wide for bf16 {
    fn divide_or_multiply(self, f: impl Fn(f64) -> f64) -> Self {
        Self::from_f64(f(self.to_f64()))
    }
}

floats!(f64: 8, f32: 4, f16: 2, bf16: 2);

fn of<T: Number<BYTES>, const BYTES: usize>(
    op: i32,
    inputs: &[Vec<u8>],
    factors: &[Option<f64>],
) -> Vec<u8> {
    let elements = inputs.first().map_or(0, |input| input.len() / BYTES);
    let element = |rank: usize, at: usize| {
        let mut bytes = [0; BYTES];
        bytes.copy_from_slice(&inputs[rank][at * BYTES..][..BYTES]);
        let value = T::from_bytes(bytes);
        factors.get(rank).copied().flatten().map_or(value, |factor| value.scaled(factor))
    };
    let mut result = Vec::with_capacity(elements * BYTES);
    for at in 0..elements {
        let first = element(0, at);
        let all = (1..inputs.len()).fold(first, |sum, rank| sum.combine(op, element(rank, at)));
        let all = if op == 4 { all.divided(inputs.len()) } else { all };
        result.extend_from_slice(&all.bytes());
    }
    result
}
