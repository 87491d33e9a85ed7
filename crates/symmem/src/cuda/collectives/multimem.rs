//! Collectives through the multicast address: the switch sums what it loads from all ranks, and stores to all ranks at once.
//!
//! It sums in an order of its own. So reductions use it only if the caller asks for [`Algorithm::Multimem`], or has a group
//! whose order is [`Order::Any`]. What it cannot do is refused before anything is put into the stream.
#![allow(unsafe_code)] // S1, S3: lengths are checked here, and kernels and copies touch nothing else

use crate::cuda::Algorithm;
use crate::cuda::device::kernels::parameters;
use crate::cuda::memory::{Elements, Memory};
use crate::cuda::stream::Stream;
use crate::cuda::symmetric::{Symmetric, View};
use crate::dtype::{DType, Element, Order, ReduceOp};
use crate::error::{Error, Result};

/// The types that the switch can sum, and of which tiles are reduced: the PTX files of the one and of the other.
pub(super) const fn files(dtype: DType) -> Option<(&'static str, &'static str)> {
    match dtype {
        DType::F32 => Some(("multimem_f32", "tiles_f32")),
        DType::F16 => Some(("multimem_f16", "tiles_f16")),
        DType::BF16 => Some(("multimem_bf16", "tiles_bf16")),
        _ => None,
    }
}

impl<T: Element> Symmetric<T> {
    /// Copies `from` to all ranks' memory from element `at` on, by the copy engine and the multicast address. Not collective,
    /// and no rank waits: a barrier has to tell peers when they may read. [`Error::Unavailable`] without multicast.
    pub fn copy_to_multicast(
        &mut self,
        from: View<'_, T>,
        at: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.copy_to_multicast(from.elements(), at, stream)
    }
}

impl Memory {
    fn copy_to_multicast(&self, from: Elements, at: usize, stream: &Stream) -> Result<()> {
        const NAME: &str = "copy_to_multicast";
        let all = self.multicast(NAME)?;
        if at.checked_add(from.len).is_none_or(|end| end > self.len()) {
            let expected = format!("elements within the {} of each rank", self.len());
            let got = format!("{} from element {at} on", from.len);
            return Err(self.group().usage(NAME, expected, got));
        }
        let (to, bytes) = (all + (at * self.size()) as u64, from.len * self.size());
        self.enqueue(NAME, self.digest(NAME, &[]), stream, |_| {
            // SAFETY: within all parts, as just checked; `from` has as many elements.
            unsafe { self.copy(to, from.address, bytes, stream) }
        })
    }

    /// Whether the group allows the switch's order, and the switch has this reduction.
    pub(in crate::cuda) fn may_multimem(&self, op: ReduceOp) -> bool {
        self.group().order() == Order::Any
            && op == ReduceOp::Sum
            && files(self.dtype()).is_some()
            && self.handle.multicast_ptr().is_some()
    }

    /// Whether the switch reduces: as the caller says, or if the group allows it. `ways` are the algorithms of the collective.
    pub(in crate::cuda) fn by_switch(
        &self,
        name: &'static str,
        op: ReduceOp,
        algorithm: Algorithm,
        ways: &str,
    ) -> Result<bool> {
        match algorithm {
            Algorithm::Multimem => Ok(true),
            Algorithm::Auto => Ok(self.may_multimem(op)),
            other => Err(self.unsupported(name, ways, other)),
        }
    }

    /// In place: each rank lets the switch sum its share, and stores the sum to all ranks.
    pub(in crate::cuda) fn multimem_all_reduce(&self, op: ReduceOp, stream: &Stream) -> Result<()> {
        const NAME: &str = "all_reduce";
        let (file, all) = self.check_multimem(NAME, op)?;
        let call = self.digest(NAME, &[op as usize, Algorithm::Multimem as usize]);
        let work = self.bytes().div_ceil(self.group().size());
        let length = self.len() as u64;
        self.enqueue(NAME, call, stream, |context| {
            let list = parameters![context.group, self.parts, all, 0_u64, length];
            // SAFETY: the kernel's parameters in order; it touches `length` elements of all parts.
            unsafe { self.run((file, "multimem_all_reduce"), work, context.target, list) }
        })
    }

    /// Stores `from` to all ranks, as this rank's block of their memory.
    pub(in crate::cuda) fn multimem_all_gather(
        &self,
        from: Elements,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "all_gather";
        let all = self.multicast(NAME)?;
        let call = self.digest(NAME, &[from.len, Algorithm::Multimem as usize]);
        let bytes = (from.len * self.size()) as u64;
        self.enqueue(NAME, call, stream, |context| {
            let kernel = ("multimem_f32", "multimem_all_gather"); // it moves bytes, of whatever type
            let list = parameters![context.group, self.parts, all, from.address, 0_u64, bytes];
            // SAFETY: the kernel's parameters in order; all parts hold a block of that many bytes for each rank.
            unsafe { self.run(kernel, bytes as usize, context.target, list) }
        })
    }

    /// The kernels' file and the multicast address, for a reduction that the switch can do.
    pub(in crate::cuda) fn check_multimem(
        &self,
        name: &'static str,
        op: ReduceOp,
    ) -> Result<(&'static str, u64)> {
        let Some((file, _)) = files(self.dtype()).filter(|_| op == ReduceOp::Sum) else {
            let expected = "a sum of f32, f16 or bf16, which is what the switch can add up";
            let got = format!("{op} of {}", self.dtype());
            return Err(self.group().usage(name, expected.to_owned(), got));
        };
        Ok((file, self.multicast(name)?))
    }

    /// The address of all ranks' memory.
    fn multicast(&self, name: &'static str) -> Result<u64> {
        let group = self.group();
        self.handle.multicast_ptr().map(|address| address as u64).ok_or_else(|| {
            let why = if self.comm.has_multicast {
                "a rank could not set it up for this memory; its rendezvous has logged why"
            } else {
                "not every rank has a device of its own that can"
            };
            let what = format!("multicast for {name} on rank {} of {group:?}", group.rank());
            Error::unavailable(what, why)
        })
    }
}
