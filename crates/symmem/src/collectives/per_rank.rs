//! A pointer for each rank, without an allocation where the ranks are few.
#![allow(unsafe_code)] // the first `ranks` of the few are initialised; no S-invariant

use std::mem::MaybeUninit;
use std::ops::Deref;

/// Up to this many lie in the value itself.
const FEW: usize = 16;

pub(super) struct PerRank<P> {
    few: [MaybeUninit<P>; FEW],
    /// All of them, where they are more.
    many: Vec<P>,
    ranks: usize,
}

impl<P: Copy> PerRank<P> {
    #[inline]
    pub(super) fn new(ranks: usize, of: impl Fn(usize) -> P) -> Self {
        let mut few = [const { MaybeUninit::uninit() }; FEW];
        if ranks > FEW {
            return Self { few, many: (0..ranks).map(of).collect(), ranks };
        }
        few.iter_mut().take(ranks).enumerate().for_each(|(rank, place)| {
            place.write(of(rank));
        });
        Self { few, many: Vec::new(), ranks }
    }
}

impl<P> Deref for PerRank<P> {
    type Target = [P];

    #[inline]
    fn deref(&self) -> &[P] {
        if self.ranks > FEW {
            return &self.many;
        }
        // SAFETY: as many were written in `new`.
        unsafe { std::slice::from_raw_parts(self.few.as_ptr().cast(), self.ranks) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_for_each_rank_however_many_there_are() {
        for ranks in [0, 1, 2, FEW, FEW + 1, 72] {
            let all = PerRank::new(ranks, |rank| 3 * rank);
            assert_eq!(*all, (0..ranks).map(|rank| 3 * rank).collect::<Vec<_>>());
        }
    }
}
