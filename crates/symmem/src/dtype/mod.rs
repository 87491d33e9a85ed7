//! Element types: what a buffer may hold, and how it is reduced.
//!
//! `elements!` below is the one table of them. Everything else derives from it: dispatch ([`with_element!`](crate::with_element)),
//! names in Python, codes of DLPack and NCCL, the kernels' file names, and the lists in tests and programs.

#![allow(unsafe_code)] // types of which every bit pattern is a value

mod boolean;
pub(crate) mod number;
mod op;
#[cfg(target_arch = "x86_64")]
mod x86;

use half::{bf16, f16};
use num_complex::Complex;
use serde::{Deserialize, Serialize};
#[cfg(feature = "cuda")]
use symmem_sys::nccl::DataType as NcclType;

pub use boolean::Bool;
pub use number::Number;
pub use op::{Order, ReduceOp};

/// What kind of number an element is, which decides the operators that apply to it: see [`ReduceOp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    Float,
    Signed,
    Unsigned,
    Bool,
    Complex,
    /// A struct of the user's: it can be moved, not reduced.
    Struct,
}

/// The columns: variant, Rust type, bytes, our name, the name in Python (NumPy's, else that of PyTorch and ml_dtypes),
/// kind, code in DLPack, how NCCL has it: as one or more of a type of its own, or not at all.
macro_rules! elements {
    ($d:tt $(
        $variant:ident, $type:ty, $bytes:literal, $name:literal, $python:literal, $kind:ident, $dlpack:literal,
        [$($nccl:ident $(x $parts:literal)?)?];
    )*) => {
        /// The type of a buffer's elements, as it travels between ranks and languages.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        #[allow(missing_docs, reason = "the names say it")]
        pub enum DType {
            $($variant,)*
            /// A struct of the user's of so many bytes: see [`Element`].
            Struct(u32),
        }

        /// [`DType`] for [`with_element!`](crate::with_element): without types that only users know, and exhaustive, so that
        /// a type that is missing somewhere is a compile error.
        #[doc(hidden)]
        #[derive(Clone, Copy, Debug)]
        pub enum Tag {
            $($variant,)*
        }

        impl DType {
            /// All but structs.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Bytes of one element.
            pub const fn size(self) -> usize {
                match self {
                    $(Self::$variant => $bytes,)*
                    Self::Struct(bytes) => bytes as usize,
                }
            }

            /// The name used in messages and reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                    Self::Struct(_) => "struct",
                }
            }

            /// What NumPy calls it, or PyTorch and ml_dtypes where NumPy lacks the type.
            pub const fn python_name(self) -> Option<&'static str> {
                match self {
                    $(Self::$variant => Some($python),)*
                    Self::Struct(_) => None,
                }
            }

            /// The kind of number.
            pub const fn kind(self) -> Kind {
                match self {
                    $(Self::$variant => Kind::$kind,)*
                    Self::Struct(_) => Kind::Struct,
                }
            }

            /// The type's code in DLPack (`DLDataTypeCode`).
            pub const fn dlpack_code(self) -> Option<u8> {
                match self {
                    $(Self::$variant => Some($dlpack),)*
                    Self::Struct(_) => None,
                }
            }

            /// As what NCCL reduces it, and how many of that make one element.
            #[cfg(feature = "cuda")]
            pub(crate) const fn nccl(self) -> Option<(NcclType, usize)> {
                match self {
                    $($(Self::$variant => Some((NcclType::$nccl, { 1 $(* $parts)? })),)?)*
                    _ => None,
                }
            }

            /// The PTX file of its reductions, where it has any.
            pub(crate) const fn kernels(self) -> Option<&'static str> {
                match self {
                    $(Self::$variant => Some(concat!("reduce_", $name)),)*
                    Self::Struct(_) => None,
                }
            }

            #[doc(hidden)]
            pub const fn tag(self) -> Option<Tag> {
                match self {
                    $(Self::$variant => Some(Tag::$variant),)*
                    Self::Struct(_) => None,
                }
            }
        }

        /// A name for each Rust type, which [`with_element!`](crate::with_element) can use in any crate.
        #[doc(hidden)]
        pub mod types {
            $(#[derive(Debug)]
            pub enum $variant {})*
        }

        $(
            impl Element for $type {
                const DTYPE: DType = {
                    assert!(size_of::<$type>() == $bytes);
                    DType::$variant
                };
            }

            impl Typed for types::$variant {
                type Type = $type;
            }
        )*

        /// Runs `$body` with `$T` standing for the Rust type of a [`DType`]: `Some` of the result, `None` for structs.
        ///
        /// ```
        /// use symmem::{DType, Element, with_element};
        ///
        /// let size = with_element!(DType::BF16, T => size_of::<T>());
        /// assert_eq!(size, Some(2));
        /// ```
        #[macro_export]
        macro_rules! with_element {
            ($d dtype:expr, $d T:ident => $d body:expr) => {
                match $d crate::DType::tag($d dtype) {
                    $(Some($d crate::dtype::Tag::$variant) => Some({
                        type $d T = <$d crate::dtype::types::$variant as $d crate::dtype::Typed>::Type;
                        $d body
                    }),)*
                    None => None,
                }
            };
        }
    };
}

elements! { $
    F64, f64, 8, "f64", "float64", Float, 2, [F64];
    F32, f32, 4, "f32", "float32", Float, 2, [F32];
    F16, f16, 2, "f16", "float16", Float, 2, [F16];
    BF16, bf16, 2, "bf16", "bfloat16", Float, 4, [Bf16];
    F8E4M3, F8E4M3, 1, "f8e4m3", "float8_e4m3fn", Float, 10, [F8E4M3];
    F8E5M2, F8E5M2, 1, "f8e5m2", "float8_e5m2", Float, 12, [F8E5M2];
    I64, i64, 8, "i64", "int64", Signed, 0, [I64];
    I32, i32, 4, "i32", "int32", Signed, 0, [I32];
    I16, i16, 2, "i16", "int16", Signed, 0, [];
    I8, i8, 1, "i8", "int8", Signed, 0, [I8];
    U64, u64, 8, "u64", "uint64", Unsigned, 1, [U64];
    U32, u32, 4, "u32", "uint32", Unsigned, 1, [U32];
    U16, u16, 2, "u16", "uint16", Unsigned, 1, [];
    U8, u8, 1, "u8", "uint8", Unsigned, 1, [U8];
    Bool, Bool, 1, "bool", "bool", Bool, 6, [U8];
    C64, Complex<f32>, 8, "c64", "complex64", Complex, 5, [F32 x 2];
    C128, Complex<f64>, 16, "c128", "complex128", Complex, 5, [F64 x 2];
}

/// The Rust type behind one of [`types`].
#[doc(hidden)]
pub trait Typed {
    type Type: Number;
}

/// A type that may lie in symmetric memory: valid for every bit pattern, and without padding.
///
/// [`bytemuck::Pod`] says so for plain numbers, and for structs of them that derive it:
///
/// ```
/// use symmem::{Element, World};
///
/// #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
/// #[repr(C)]
/// struct Particle {
///     position: [f32; 3],
///     charge: f32,
/// }
///
/// impl Element for Particle {}
///
/// World::threads(2, |world| -> symmem::Result<()> {
///     let mut particles = world.alloc::<Particle>(8)?.rendezvous(&world)?;
///     particles.local_mut()[0].charge = world.rank() as f32;
///     particles.broadcast(1)?;
///     assert_eq!(particles.local()[0].charge, 1.0);
///     Ok(())
/// })?
/// .into_iter()
/// .collect::<symmem::Result<()>>()?;
/// # Ok::<(), symmem::Error>(())
/// ```
///
/// Ranks compare the element type of a call. Two structs of the same size are the same type to them.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The type as a value. Leave the default for structs.
    const DTYPE: DType = {
        assert!(size_of::<Self>() > 0, "an element has at least one byte");
        assert!(align_of::<Self>() <= 128, "symmetric memory is aligned to 128 bytes");
        assert!(size_of::<Self>() <= u32::MAX as usize, "an element has less than 4 GiB");
        DType::Struct(size_of::<Self>() as u32)
    };
}

// `usize` and `isize` have the size of a 64-bit integer on every machine that the library runs on.
impl Element for usize {
    const DTYPE: DType = DType::U64;
}

impl Element for isize {
    const DTYPE: DType = DType::I64;
}

impl DType {
    /// The type of this name: one of ours (`"f32"`), or Python's (`"float32"`).
    pub fn by_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|dtype| dtype.name() == name || dtype.python_name() == Some(name))
    }

    /// As a number below 2⁸, and bytes of a struct.
    pub(crate) fn code(self) -> (u8, u32) {
        match self {
            Self::Struct(bytes) => (Self::ALL.len() as u8, bytes),
            other => (other.tag().map_or(0, |tag| tag as u8), 0),
        }
    }

    /// The inverse of [`DType::code`].
    pub(crate) fn from_code(code: u8, bytes: u32) -> Self {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Self::Struct(bytes))
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Struct(bytes) => write!(f, "a struct of {bytes} bytes"),
            other => f.write_str(other.name()),
        }
    }
}

macro_rules! small_floats {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(
            /// The bits.
            pub u8,
        );

        // SAFETY: a byte, of which every pattern is a value.
        unsafe impl bytemuck::Zeroable for $name {}
        // SAFETY: as above.
        unsafe impl bytemuck::Pod for $name {}
    )*};
}

small_floats! {
    /// An 8-bit float of 4 exponent and 3 mantissa bits, without infinities: PyTorch's `float8_e4m3fn`.
    F8E4M3;
    /// An 8-bit float of 5 exponent and 2 mantissa bits: PyTorch's `float8_e5m2`.
    F8E5M2;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_lead_back_to_their_type() {
        for dtype in DType::ALL.iter().copied().chain([DType::Struct(24)]) {
            let (code, bytes) = dtype.code();
            assert_eq!(DType::from_code(code, bytes), dtype);
        }
        for &dtype in DType::ALL {
            assert_eq!(DType::by_name(dtype.name()), Some(dtype));
            assert_eq!(dtype.python_name().and_then(DType::by_name), Some(dtype));
        }
        assert_eq!(DType::by_name("struct"), None);
    }

    #[test]
    fn dispatch_reaches_the_type_of_each_row() {
        for &dtype in DType::ALL {
            assert_eq!(with_element!(dtype, T => T::DTYPE), Some(dtype));
        }
        assert_eq!(with_element!(DType::Struct(4), T => T::DTYPE), None);
    }
}
