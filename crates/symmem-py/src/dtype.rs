//! Element types by name, as numpy, DLPack and the library know them.

use pyo3::prelude::*;
use symmem::DType;

use crate::error::usage;

/// One type of elements.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Type {
    /// numpy's name, or that of torch and ml_dtypes where numpy has none.
    pub(crate) name: &'static str,
    /// The type in which the library reduces it, if it does.
    pub(crate) element: Option<DType>,
    /// DLPack's code and bits.
    pub(crate) code: u8,
    pub(crate) bits: u8,
    /// numpy's letter for the kind, if numpy has the type.
    pub(crate) kind: Option<char>,
}

const fn of(
    name: &'static str,
    element: Option<DType>,
    code: u8,
    bits: u8,
    kind: Option<char>,
) -> Type {
    Type { name, element, code, bits, kind }
}

static TYPES: [Type; 20] = [
    of("float32", Some(DType::F32), 2, 32, Some('f')),
    of("float64", Some(DType::F64), 2, 64, Some('f')),
    of("float16", Some(DType::F16), 2, 16, Some('f')),
    of("bfloat16", Some(DType::BF16), 4, 16, None),
    of("float8_e4m3fn", Some(DType::F8E4M3), 10, 8, None),
    of("float8_e5m2", Some(DType::F8E5M2), 12, 8, None),
    of("int64", Some(DType::I64), 0, 64, Some('i')),
    of("int32", Some(DType::I32), 0, 32, Some('i')),
    of("int16", Some(DType::I16), 0, 16, Some('i')),
    of("int8", Some(DType::I8), 0, 8, Some('i')),
    of("uint64", Some(DType::U64), 1, 64, Some('u')),
    of("uint32", Some(DType::U32), 1, 32, Some('u')),
    of("uint16", Some(DType::U16), 1, 16, Some('u')),
    of("uint8", Some(DType::U8), 1, 8, Some('u')),
    of("bool", None, 6, 8, Some('b')),
    of("complex64", None, 5, 64, Some('c')),
    of("complex128", None, 5, 128, Some('c')),
    of("float8_e8m0fnu", None, 14, 8, None),
    of("float8_e4m3fnuz", None, 11, 8, None),
    of("float8_e5m2fnuz", None, 13, 8, None),
];

impl Type {
    /// The type of bytes.
    pub(crate) const BYTES: &'static Self = &TYPES[13];
    /// That of numbers of rows.
    pub(crate) const NUMBERS: &'static Self = &TYPES[6];

    /// Bytes of one element.
    pub(crate) fn size(&self) -> usize {
        usize::from(self.bits / 8)
    }

    pub(crate) fn by_name(name: &str) -> Option<&'static Self> {
        TYPES.iter().find(|t| t.name == name)
    }

    pub(crate) fn by_code(code: u8, bits: u8) -> Option<&'static Self> {
        TYPES.iter().find(|t| (t.code, t.bits) == (code, bits))
    }

    /// What Python calls it: a name, numpy's or torch's (`torch.float32`, `<class 'numpy.float32'>`, `dtype('float32')`).
    pub(crate) fn named(op: &'static str, given: &Bound<'_, PyAny>) -> PyResult<&'static Self> {
        let named = |of: &Bound<'_, PyAny>| -> Option<String> {
            of.getattr("__name__").or_else(|_| of.getattr("name")).ok()?.extract().ok()
        };
        let text = match given.extract::<String>() {
            Ok(name) => name,
            Err(_) => named(given).map_or_else(|| Ok(given.str()?.to_string()), PyResult::Ok)?,
        };
        let name = text.strip_prefix("torch.").unwrap_or(&text);
        let short = |t: &Type| t.element.is_some_and(|element| element.name() == name);
        TYPES.iter().find(|t| t.name == name || short(t)).ok_or_else(|| {
            let known: Vec<_> = TYPES.iter().map(|t| t.name).collect();
            usage(given.py(), op, format!("one of the types {}", known.join(", ")), text)
        })
    }

    /// The library's type, of which there is arithmetic.
    pub(crate) fn arithmetic(&self, py: Python<'_>, op: &'static str) -> PyResult<DType> {
        self.element.ok_or_else(|| usage(py, op, "a type that can be reduced", self.name))
    }

    /// A type of the library's whose elements are as long, for calls that only move them; of the longest, half as long.
    pub(crate) fn moved(&self, py: Python<'_>, op: &'static str) -> PyResult<DType> {
        let bits = self.bits.min(64);
        let as_long = || TYPES.iter().find(|t| t.code == 1 && t.bits == bits)?.element;
        self.element
            .or_else(as_long)
            .ok_or_else(|| usage(py, op, "a type that can be moved", self.name))
    }

    /// How many elements of what it is moved as make one of it.
    pub(crate) fn words(&self) -> usize {
        usize::from(self.bits.div_ceil(64))
    }

    /// numpy's three letters for it.
    pub(crate) fn typestr(&self) -> Option<String> {
        let order = if self.bits == 8 { '|' } else { '<' };
        self.kind.map(|kind| format!("{order}{kind}{}", self.size()))
    }
}

/// Runs `$body` with `$T` standing for the Rust type of a [`DType`].
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {{
        use symmem::DType;
        macro_rules! arm {
            ($type:ty) => {{
                type $T = $type;
                $body
            }};
        }
        match $dtype {
            DType::F64 => arm!(f64),
            DType::F32 => arm!(f32),
            DType::F16 => arm!(half::f16),
            DType::BF16 => arm!(half::bf16),
            DType::F8E4M3 => arm!(symmem::F8E4M3),
            DType::F8E5M2 => arm!(symmem::F8E5M2),
            DType::I64 => arm!(i64),
            DType::I32 => arm!(i32),
            DType::I16 => arm!(i16),
            DType::I8 => arm!(i8),
            DType::U64 => arm!(u64),
            DType::U32 => arm!(u32),
            DType::U16 => arm!(u16),
            _ => arm!(u8), // U8: the table above has no others
        }
    }};
}
pub(crate) use with_element;
