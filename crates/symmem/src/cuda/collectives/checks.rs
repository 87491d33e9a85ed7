//! What a collective on device memory checks before it launches anything.

use crate::cuda::Algorithm;
use crate::cuda::memory::Memory;
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::group::digest;

impl Memory {
    pub(crate) fn check_operator(&self, name: &'static str, op: ReduceOp) -> Result<()> {
        crate::collectives::check_operator(self.group(), name, self.dtype(), op)
    }

    pub(crate) fn digest(&self, name: &'static str, agreed: &[usize]) -> u32 {
        digest(name, self.dtype(), self.handle.digest(), self.len(), agreed)
    }

    pub(crate) fn block(&self, name: &'static str, len: usize) -> Result<usize> {
        crate::collectives::block_len(self.group(), name, len)
    }

    pub(crate) fn check_out(&self, name: &'static str, expected: usize, got: usize) -> Result<()> {
        crate::collectives::check_len(self.group(), name, "an output", expected, got)
    }

    /// Likewise on the root only: the others ignore their outputs, and would wait for the root.
    pub(crate) fn check_roots_out(
        &self,
        name: &'static str,
        expected: usize,
        got: usize,
    ) -> Result<()> {
        self.check_out(name, expected, got).map_err(|e| self.refused(name, e))
    }

    /// Tells the other ranks of an error that they do not find by themselves.
    pub(crate) fn refused(&self, name: &'static str, error: Error) -> Error {
        if let Err(e) = self.refuse(name) {
            tracing::warn!("the other ranks wait for {name} until their deadline: {e}");
        }
        error
    }

    /// The error of an algorithm that a collective does not have.
    pub(in crate::cuda) fn unsupported(
        &self,
        name: &'static str,
        ways: &str,
        got: Algorithm,
    ) -> Error {
        self.group().usage(name, format!("the algorithm {ways}"), format!("{got:?}"))
    }
}
