//! Element types by name, as Python, DLPack and the library know them: the library's own table, and types that are only moved.

use std::sync::LazyLock;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use symmem::{DType, ReduceOp};

use crate::error::{Op, usage};

/// One type of elements.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Type {
    /// NumPy's name, or that of torch and ml_dtypes where NumPy lacks the type.
    pub(crate) name: &'static str,
    /// The type as which the library moves it.
    pub(crate) moved: DType,
    /// Whether the library reduces it, too.
    is_number: bool,
    /// DLPack's code.
    pub(crate) code: u8,
}

/// 8-bit floats that the library cannot reduce, with their codes in DLPack.
const OPAQUE: [(&str, u8); 3] =
    [("float8_e8m0fnu", 14), ("float8_e4m3fnuz", 11), ("float8_e5m2fnuz", 13)];

static TYPES: LazyLock<Vec<Type>> = LazyLock::new(|| {
    let known = DType::ALL.iter().filter_map(|&moved| {
        let (name, code) = (moved.python_name()?, moved.dlpack_code()?);
        Some(Type { name, moved, is_number: true, code })
    });
    let opaque = OPAQUE.map(|(name, code)| Type { name, moved: DType::U8, is_number: false, code });
    known.chain(opaque).collect()
});

/// Bytes, as a fallback.
static BYTES: Type = Type { name: "uint8", moved: DType::U8, is_number: true, code: 1 };

impl Type {
    /// The type of one of the library's.
    pub(crate) fn of(dtype: DType) -> &'static Self {
        TYPES.iter().find(|t| t.moved == dtype && t.is_number).unwrap_or(&BYTES)
    }

    /// Bytes of one element.
    pub(crate) fn size(&self) -> usize {
        self.moved.size()
    }

    /// Bits of one element.
    pub(crate) fn bits(&self) -> u8 {
        8 * self.size() as u8
    }

    pub(crate) fn by_name(name: &str) -> Option<&'static Self> {
        TYPES.iter().find(|t| t.name == name)
    }

    pub(crate) fn by_code(code: u8, bits: u8) -> Option<&'static Self> {
        TYPES.iter().find(|t| (t.code, t.bits()) == (code, bits))
    }

    /// The type that Python names: a string, numpy's type or torch's (`torch.float32`, `<class 'numpy.float32'>`, `dtype('float32')`).
    pub(crate) fn named(op: impl Into<Op>, given: &Bound<'_, PyAny>) -> PyResult<&'static Self> {
        let named = |of: &Bound<'_, PyAny>| -> Option<String> {
            of.getattr("__name__").or_else(|_| of.getattr("name")).ok()?.extract().ok()
        };
        let text = match given.extract::<String>() {
            Ok(name) => name,
            Err(_) => named(given).map_or_else(|| Ok(given.str()?.to_string()), PyResult::Ok)?,
        };
        let name = text.strip_prefix("torch.").unwrap_or(&text);
        let known = Self::by_name(name).or_else(|| DType::by_name(name).map(Self::of));
        known.ok_or_else(|| {
            let known: Vec<_> = TYPES.iter().map(|t| t.name).collect();
            usage(given.py(), op, format!("one of the types {}", known.join(", ")), text)
        })
    }

    /// The library's type, if it reduces it.
    pub(crate) fn number(&self) -> Option<DType> {
        self.is_number.then_some(self.moved)
    }

    /// NumPy's type string, if NumPy has the type.
    pub(crate) fn typestr(&self) -> Option<String> {
        let kind = match self.code {
            0 => 'i',
            1 => 'u',
            2 => 'f',
            5 => 'c',
            6 => 'b',
            _ => return None,
        };
        let order = if self.size() == 1 { '|' } else { '<' };
        Some(format!("{order}{kind}{}", self.size()))
    }
}

/// All types by name, each with the names of the operators that reduce it.
pub(crate) fn names(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    for known in TYPES.iter() {
        let applies = |op: &ReduceOp| known.number().is_some_and(|d| op.applies_to(d.kind()));
        let operators: Vec<_> =
            ReduceOp::ALL.into_iter().filter(applies).map(ReduceOp::name).collect();
        all.set_item(known.name, PyTuple::new(py, operators)?)?;
    }
    Ok(all)
}
