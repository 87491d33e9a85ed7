//! What is made of sends and receives that are begun together: all-to-all, gather, scatter.
#![allow(unsafe_code)] // S1, S3, S4, S5: lengths are checked here; sources and targets vouch for addresses

use super::communicator::Communicator;
use super::elements::{Source, Target};
use crate::cuda::Stream;
use crate::error::Result;

impl Communicator {
    /// Part i of `from` to rank i, and from rank i into part i of `to`: parts of equal size. Collective.
    pub fn all_to_all<'a>(
        &self,
        from: impl Into<Source<'a>>,
        to: impl Into<Target<'a>>,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "all_to_all";
        let (from, to, size) = (from.into(), to.into(), self.size());
        self.check_len(OP, (from.len, from.dtype), (to.len, to.dtype))?;
        if !from.len.is_multiple_of(size) {
            let expected = format!("a multiple of {size} elements");
            return Err(self.usage(OP, expected, from.len.to_string()));
        }
        let parts = vec![from.len / size; size];
        self.send_and_receive(from, &parts, to, &parts, stream)
    }

    /// As [`all_to_all`](Self::all_to_all), with parts of these many elements, one after the other: `sent[i]` is for rank i,
    /// `received[i]` from rank i, who must say the same. Collective.
    pub fn all_to_all_v<'a>(
        &self,
        from: impl Into<Source<'a>>,
        sent: &[usize],
        to: impl Into<Target<'a>>,
        received: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "all_to_all_v";
        let (from, to) = (from.into(), to.into());
        for (counts, len) in [(sent, from.len), (received, to.len)] {
            let sum = counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
            if counts.len() != self.size() || sum.is_none_or(|sum| sum > len) {
                let expected = format!("{} counts of at most {len} elements together", self.size());
                return Err(self.usage(OP, expected, format!("{counts:?}")));
            }
        }
        self.check_len(OP, (0, from.dtype), (0, to.dtype))?;
        self.send_and_receive(from, sent, to, received, stream)
    }

    fn send_and_receive(
        &self,
        from: Source<'_>,
        sent: &[usize],
        to: Target<'_>,
        received: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        self.nccl().group(|| {
            let (mut taken, mut put) = (0, 0);
            for (peer, (&sent, &received)) in sent.iter().zip(received).enumerate() {
                if sent > 0 {
                    self.send(from.part(taken, sent), peer, stream)?;
                }
                if received > 0 {
                    self.recv(part(&to, put, received), peer, stream)?;
                }
                taken += sent;
                put += received;
            }
            Ok(())
        })
    }

    /// Everyone's `from`, one after the other in rank order, into `to` of the root. Collective.
    pub fn gather<'a>(
        &self,
        from: impl Into<Source<'a>>,
        to: Option<Target<'a>>,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "gather";
        let from = from.into();
        let to = self.at_root(OP, to, (root, "write"))?;
        if let Some(to) = &to {
            self.check_len(OP, (from.len * self.size(), from.dtype), (to.len, to.dtype))?;
        }
        self.nccl().group(|| {
            self.send(from, root, stream)?;
            let Some(to) = &to else { return Ok(()) };
            (0..self.size())
                .try_for_each(|rank| self.recv(part(to, rank * from.len, from.len), rank, stream))
        })
    }

    /// Part i of the root's `from` into `to` of rank i. Collective.
    pub fn scatter<'a>(
        &self,
        from: Option<Source<'a>>,
        to: impl Into<Target<'a>>,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "scatter";
        let to = to.into();
        let from = self.at_root(OP, from, (root, "read"))?;
        if let Some(from) = &from {
            self.check_len(OP, (from.len, from.dtype), (to.len * self.size(), to.dtype))?;
        }
        self.nccl().group(|| {
            if let Some(from) = from {
                (0..self.size()).try_for_each(|rank| {
                    self.send(from.part(rank * to.len, to.len), rank, stream)
                })?;
            }
            self.recv(part(&to, 0, to.len), root, stream)
        })
    }
}

/// `len` elements from `offset` on, which lie within: no two parts of a call have any in common.
fn part<'a>(to: &'a Target<'_>, offset: usize, len: usize) -> Target<'a> {
    let part = to.as_source().part(offset, len);
    // SAFETY: within what the target vouches for.
    unsafe { Target::from_raw(part.address, len, to.dtype) }
}
