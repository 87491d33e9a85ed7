//! Element types: what a buffer may hold, and how it is reduced.

pub(crate) mod number;
mod op;
#[cfg(target_arch = "x86_64")]
mod x86;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

pub use op::{Order, ReduceOp};

/// The type of a buffer's elements, as it travels between ranks and languages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names say it")]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
}

impl DType {
    /// All, in the order of their numbers.
    pub(crate) const ALL: [Self; 14] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::I64,
        Self::I32,
        Self::I16,
        Self::I8,
        Self::U64,
        Self::U32,
        Self::U16,
        Self::U8,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::F8E4M3 | Self::F8E5M2 | Self::I8 | Self::U8 => 1,
        }
    }

    /// The name used in messages and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::U64 => "u64",
            Self::U32 => "u32",
            Self::U16 => "u16",
            Self::U8 => "u8",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// An 8-bit float of 4 exponent and 3 mantissa bits, without infinities: PyTorch's `float8_e4m3fn`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F8E4M3(
    /// The bits.
    pub u8,
);

/// An 8-bit float of 5 exponent and 2 mantissa bits: PyTorch's `float8_e5m2`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F8E5M2(
    /// The bits.
    pub u8,
);

mod sealed {
    /// Closed to other crates, and the way from an element to its arithmetic.
    pub trait Sealed: super::number::Number {}
}

/// A type that may lie in symmetric memory: plain numbers, valid for every bit pattern, zero included.
///
/// Sealed, because unsafe code relies on exactly that.
pub trait Element: sealed::Sealed + Copy + Send + Sync + std::fmt::Debug + 'static {
    /// The type as a value.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2,
    i64 => I64, i32 => I32, i16 => I16, i8 => I8,
    u64 => U64, u32 => U32, u16 => U16, u8 => U8,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same_size<T: Element>() {
        assert_eq!(T::DTYPE.size(), size_of::<T>(), "{}", T::DTYPE);
    }

    #[test]
    fn every_element_type_has_the_size_its_name_says() {
        same_size::<f64>();
        same_size::<f32>();
        same_size::<f16>();
        same_size::<bf16>();
        same_size::<F8E4M3>();
        same_size::<F8E5M2>();
        same_size::<i64>();
        same_size::<i32>();
        same_size::<i16>();
        same_size::<i8>();
        same_size::<u64>();
        same_size::<u32>();
        same_size::<u16>();
        same_size::<u8>();
    }
}
