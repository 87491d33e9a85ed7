//! How collectives on devices are done.

/// How a collective on devices is done. All ways give the same bits but [`Algorithm::Multimem`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Whichever should be the fastest.
    #[default]
    Auto,
    /// Every rank writes its elements next to its flag, and reduces what all have written: one barrier.
    Staged,
    /// Every rank reduces all elements for itself.
    OneShot,
    /// Every rank reduces its share of the elements and stores it with all: each byte crosses once each way.
    TwoShot,
    /// With multicast: the switch adds up what it loads from all ranks, in an order of its own, and stores the same with all.
    /// Sums of f32, f16 and bf16.
    Multimem,
    /// The copy engine moves the bytes and leaves the multiprocessors to others.
    CopyEngine,
}

impl Algorithm {
    /// The same for memory of the host, which has no multicast and no copy engine.
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
