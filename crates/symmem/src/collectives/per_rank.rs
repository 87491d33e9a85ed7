//! A pointer for each rank, without an allocation where the ranks are few.
#![allow(unsafe_code)] // the first `ranks` of the few are initialised; no S-invariant

use std::mem::MaybeUninit;

/// Up to this many lie in the value itself.
const FEW: usize = 16;

/// Room for the pointers. It is filled where it lies: moving it would wait until all stores to it are through.
pub(super) struct PerRank<P> {
    few: [MaybeUninit<P>; FEW],
    /// All of them, where they are more.
    many: Vec<P>,
}

impl<P: Copy> PerRank<P> {
    #[inline(always)]
    pub(super) const fn new() -> Self {
        Self { few: [const { MaybeUninit::uninit() }; FEW], many: Vec::new() }
    }

    /// The pointers of all ranks, each as `of` has it.
    #[inline(always)] // it is between the last flag and the work
    pub(super) fn fill(&mut self, ranks: usize, of: impl Fn(usize) -> P) -> &[P] {
        if ranks > FEW {
            self.fill_many(ranks, of);
            return &self.many;
        }
        for (rank, place) in self.few.iter_mut().take(ranks).enumerate() {
            place.write(of(rank));
        }
        // SAFETY: as many were just written.
        unsafe { std::slice::from_raw_parts(self.few.as_ptr().cast(), ranks) }
    }

    #[cold]
    fn fill_many(&mut self, ranks: usize, of: impl Fn(usize) -> P) {
        self.many.clear();
        self.many.extend((0..ranks).map(of));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_for_each_rank_however_many_there_are() {
        for ranks in [0, 1, 2, FEW, FEW + 1, 72] {
            let mut all = PerRank::new();
            assert_eq!(
                all.fill(ranks, |rank| 3 * rank),
                (0..ranks).map(|rank| 3 * rank).collect::<Vec<_>>()
            );
        }
    }
}
