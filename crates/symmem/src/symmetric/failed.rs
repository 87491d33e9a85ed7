//! An error that gives back what the failed call had taken.

use crate::error::Error;

/// Why a call failed, and what it had taken from the caller. The question mark turns it into the plain [`Error`].
pub struct Failed<K> {
    /// The cause.
    pub error: Error,
    /// What the call took.
    pub kept: K,
}

impl<K> From<Failed<K>> for Error {
    fn from(failed: Failed<K>) -> Self {
        failed.error
    }
}

impl<K> std::fmt::Debug for Failed<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl<K> std::fmt::Display for Failed<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl<K> std::error::Error for Failed<K> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}
