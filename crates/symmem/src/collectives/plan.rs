//! Which algorithm should be the fastest: a small cost model, the same on all ranks.

use super::Algorithm;
use crate::group::DESK;

/// The algorithm for an all-reduce in place of `bytes` between `ranks`.
pub fn choose(bytes: usize, _ranks: usize) -> Algorithm {
    if bytes <= 4096 { Algorithm::Staged } else { Algorithm::TwoShot }
}

/// Whether parts of `len` elements are better laid out beside the flags than read where they are.
pub(super) fn is_small<T>(len: usize, _ranks: usize) -> bool {
    len * size_of::<T>() <= DESK.min(4096)
}
