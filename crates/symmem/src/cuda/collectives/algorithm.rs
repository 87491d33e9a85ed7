//! How collectives on devices are done.

/// How a collective on devices is done. All algorithms give the same bits, except [`Algorithm::Multimem`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// The one that should be the fastest.
    #[default]
    Auto,
    /// Every rank stages its elements with its flag, and reduces what all have staged: one barrier.
    Staged,
    /// Every rank reduces all elements for itself.
    OneShot,
    /// Every rank reduces its share of the elements and stores it to all ranks: each byte crosses once in each direction.
    TwoShot,
    /// With multicast: the switch sums what it loads from all ranks, in an order of its own, and stores the sum to all ranks.
    /// Sums of f32, f16 and bf16.
    Multimem,
    /// The copy engines move the bytes, and the multiprocessors stay free for other work.
    CopyEngine,
}

impl Algorithm {
    /// The same algorithm on host memory, which has no multicast and no copy engines.
    pub const fn on_host(self) -> Option<crate::Algorithm> {
        match self {
            Self::Auto => Some(crate::Algorithm::Auto),
            Self::Staged => Some(crate::Algorithm::Staged),
            Self::OneShot => Some(crate::Algorithm::OneShot),
            Self::TwoShot => Some(crate::Algorithm::TwoShot),
            Self::Multimem | Self::CopyEngine => None,
        }
    }
}
