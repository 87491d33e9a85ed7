//! What calls read and write, and how they reduce it.
#![allow(unsafe_code)] // S4, S5

use std::marker::PhantomData;

use symmem_sys::nccl as sys;

use super::communicator::Communicator;
use crate::cuda::{View, ViewMut};
use crate::dtype::{DType, Element, Kind, ReduceOp};
use crate::error::{Error, Result};

/// Elements on a device that a call reads.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) dtype: DType,
    of: PhantomData<&'a ()>,
}

/// Elements on a device that a call writes.
#[derive(Debug)]
pub struct Target<'a> {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) dtype: DType,
    of: PhantomData<&'a mut ()>,
}

impl Source<'_> {
    /// Of memory that somebody else has allocated.
    ///
    /// # Safety
    /// The device of the call can read `len` elements at `address` until what is put into the stream is done.
    pub unsafe fn from_raw(address: u64, len: usize, dtype: DType) -> Self {
        Self { address, len, dtype, of: PhantomData }
    }

    /// `len` elements from `offset` on, which must lie within.
    pub(super) fn part(self, offset: usize, len: usize) -> Self {
        let address = self.address + (offset * self.dtype.size()) as u64;
        Self { address, len, ..self }
    }
}

impl Target<'_> {
    /// Of memory that somebody else has allocated.
    ///
    /// # Safety
    /// The device of the call can write `len` elements at `address` until what is put into the stream is done, and nobody
    /// else touches them meanwhile.
    pub unsafe fn from_raw(address: u64, len: usize, dtype: DType) -> Self {
        Self { address, len, dtype, of: PhantomData }
    }

    /// The same elements, as what the call reads too.
    pub(super) fn as_source(&self) -> Source<'_> {
        Source { address: self.address, len: self.len, dtype: self.dtype, of: PhantomData }
    }
}

impl<'a, T: Element> From<View<'a, T>> for Source<'a> {
    fn from(view: View<'a, T>) -> Self {
        Self { address: view.address, len: view.len, dtype: T::DTYPE, of: PhantomData }
    }
}

impl<'a, T: Element> From<ViewMut<'a, T>> for Target<'a> {
    fn from(view: ViewMut<'a, T>) -> Self {
        Self { address: view.address, len: view.len, dtype: T::DTYPE, of: PhantomData }
    }
}

/// So many elements, for a call that only moves them: as bytes, where the library does not know them or an old one does not.
pub(super) fn moved(len: usize, dtype: DType) -> sys::Span {
    let known = dtype.nccl().filter(|_| !matches!(dtype, DType::F8E4M3 | DType::F8E5M2));
    let (kind, parts) = known.unwrap_or((sys::DataType::U8, dtype.size()));
    sys::Span { count: len * parts, kind }
}

/// So many elements, and the operator as the library has it for them.
pub(super) fn reduced(
    name: &'static str,
    rank: usize,
    len: usize,
    dtype: DType,
    op: Operator,
) -> Result<(sys::Span, sys::RedOp)> {
    let usage = |expected, got: String| Error::usage(name, expected, got).at_rank(rank);
    let (kind, parts) = dtype.nccl().ok_or_else(|| {
        usage("a type that NCCL reduces", format!("Unconvertible NCCL type {dtype}"))
    })?;
    let code = match (dtype.kind(), op.0) {
        (_, Ok(code)) => code,
        // As PyTorch has it: the smallest and the largest of 0 and 1 are "and" and "or".
        (Kind::Bool, Err(ReduceOp::Sum | ReduceOp::Max | ReduceOp::Or)) => sys::RedOp::MAX,
        (Kind::Bool, Err(ReduceOp::Product | ReduceOp::Min | ReduceOp::And)) => sys::RedOp::MIN,
        (Kind::Bool, Err(op)) => return Err(usage("an operator of truth values", op.to_string())),
        // Sums go by part.
        (Kind::Complex, Err(ReduceOp::Sum)) => sys::RedOp::SUM,
        (Kind::Complex, Err(ReduceOp::Average)) => sys::RedOp::AVG,
        (Kind::Complex, Err(op)) => {
            return Err(usage("sum or avg of complex numbers", op.to_string()));
        }
        (_, Err(op)) => match op {
            ReduceOp::Sum => sys::RedOp::SUM,
            ReduceOp::Average => sys::RedOp::AVG,
            ReduceOp::Product => sys::RedOp::PROD,
            ReduceOp::Min => sys::RedOp::MIN,
            ReduceOp::Max => sys::RedOp::MAX,
            ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => {
                return Err(usage("sum, prod, min, max or avg", op.to_string()));
            }
        },
    };
    Ok((sys::Span { count: len * parts, kind }, code))
}

/// How elements are reduced: a [`ReduceOp`], a [`ScaledSum`], or a number of the library's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operator(std::result::Result<sys::RedOp, ReduceOp>);

impl Operator {
    /// By its number, which the library checks.
    pub const fn from_code(code: i32) -> Self {
        Self(Ok(sys::RedOp(code)))
    }
}

impl From<ReduceOp> for Operator {
    fn from(op: ReduceOp) -> Self {
        Self(Err(op))
    }
}

/// A sum of elements that are multiplied with a factor first, which may differ between ranks. Of one communicator.
#[derive(Debug)]
pub struct ScaledSum {
    communicator: Communicator,
    op: sys::RedOp,
}

impl Communicator {
    /// A sum of elements of `dtype` (f32, f64 or i32) that are multiplied with `factor` first.
    pub fn scaled_sum(&self, factor: f64, dtype: DType) -> Result<ScaledSum> {
        const OP: &str = "scaled_sum";
        let narrow = |[a, b, c, d]: [u8; 4]| [a, b, c, d, 0, 0, 0, 0];
        let (bytes, kind) = match dtype {
            DType::F64 => (factor.to_ne_bytes(), sys::DataType::F64),
            DType::F32 => (narrow((factor as f32).to_ne_bytes()), sys::DataType::F32),
            DType::I32 => (narrow((factor as i32).to_ne_bytes()), sys::DataType::I32),
            other => return Err(self.usage(OP, "f32, f64 or i32".into(), other.to_string())),
        };
        // SAFETY: S4: `ask` gives a communicator that is live.
        let op = self.ask(OP, |nccl, comm| unsafe { nccl.pre_mul_sum(comm, &bytes, kind) })?;
        Ok(ScaledSum { communicator: self.clone(), op })
    }
}

impl From<&ScaledSum> for Operator {
    fn from(sum: &ScaledSum) -> Self {
        Self(Ok(sum.op))
    }
}

impl Drop for ScaledSum {
    fn drop(&mut self) {
        // SAFETY: S4: made by this communicator, and not used again. An aborted one has taken it along.
        let _ = self
            .communicator
            .ask("scaled_sum", |nccl, comm| unsafe { nccl.red_op_destroy(comm, self.op) });
    }
}
