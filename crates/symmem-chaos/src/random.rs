//! Numbers that look random and come again from the same seed.

use crate::element::mix;

/// A generator, from its seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Another one every time.
    pub fn unseeded() -> Self {
        let mut seed = [0; 8];
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        Self(u64::from_le_bytes(seed))
    }

    /// The next number.
    #[allow(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}
