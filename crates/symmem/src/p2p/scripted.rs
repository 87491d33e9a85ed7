//! A source whose fragments a test or a fuzzer writes.

use std::collections::VecDeque;

use super::fragment::Words;
use super::incoming::Source;

/// The value of every byte that arrives.
pub(super) const VALUE: u8 = 7;

#[derive(Default)]
pub(super) struct Scripted {
    pub(super) fragments: VecDeque<Words>,
    pub(super) withdrawn: u32,
}

impl Source for Scripted {
    fn front(&mut self) -> Option<Words> {
        self.fragments.front().copied()
    }

    fn read(&mut self, out: &mut [u8]) {
        out.fill(VALUE);
    }

    fn pop(&mut self, _bytes: usize) {
        self.fragments.pop_front();
    }

    fn withdrawn(&mut self) -> u32 {
        self.withdrawn
    }
}
