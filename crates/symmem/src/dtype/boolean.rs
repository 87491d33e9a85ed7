//! Truth values in memory that others write.
#![allow(unsafe_code)] // a type of which every bit pattern is a value

/// A truth value of one byte: 0 is false, everything else is true. PyTorch's `bool`.
///
/// Rust's `bool` must be 0 or 1, which nobody can promise of memory that peers write. Reductions give 0 or 1.
///
/// ```
/// use symmem::Bool;
///
/// assert!(bool::from(Bool::from(true)));
/// assert_eq!(Bool::default(), Bool::from(false));
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bool(u8);

// SAFETY: a byte, of which every pattern is a value.
unsafe impl bytemuck::Zeroable for Bool {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Bool {}

impl From<bool> for Bool {
    fn from(value: bool) -> Self {
        Self(value.into())
    }
}

impl From<Bool> for bool {
    #[inline]
    fn from(value: Bool) -> Self {
        value.0 != 0
    }
}

impl PartialEq for Bool {
    fn eq(&self, other: &Self) -> bool {
        bool::from(*self) == bool::from(*other)
    }
}

impl Eq for Bool {}

impl std::hash::Hash for Bool {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        bool::from(*self).hash(state);
    }
}

impl std::fmt::Debug for Bool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl std::fmt::Display for Bool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", bool::from(*self))
    }
}
