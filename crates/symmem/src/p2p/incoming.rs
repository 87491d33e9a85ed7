//! Messages of one peer: put together from fragments, in the order of sending, and kept until a thread asks for them.

use std::collections::{HashMap, VecDeque};

use super::fragment::{Fragment, Invalid, Kind, Words};
use crate::dtype::DType;

/// The most bytes of messages of one peer that are kept here. What does not fit stays with the peer.
pub(super) const KEPT: usize = 64 << 20;
/// What a message counts for besides its bytes.
const OVERHEAD: usize = 64;
/// How many fragments are taken before the caller looks at its deadline again.
const AT_ONCE: usize = 64;

/// Where fragments come from.
pub(crate) trait Source {
    /// The header of the next one, if it is there.
    fn front(&mut self) -> Option<Words>;

    /// Its data.
    fn read(&mut self, out: &mut [u8]);

    /// Goes on behind it.
    fn pop(&mut self, bytes: usize);

    /// The number of the message that the sender withdrew, if it has begun no other one since; else 0. Whoever looks for its
    /// fragments afterwards finds all of them.
    fn withdrawn(&mut self) -> u32;
}

/// The number of the message after that of number `last`, or of the first after 0. After 2³² - 1 messages the numbers come again.
pub(crate) fn number_after(last: u32) -> u32 {
    last.wrapping_add(1).max(1)
}

/// What a thread waits for.
pub(crate) struct Post<'a> {
    pub(crate) tag: u64,
    pub(crate) dtype: DType,
    pub(crate) out: &'a mut [u8],
}

impl Post<'_> {
    fn fits(&self, dtype: DType, total: usize) -> bool {
        (self.dtype, self.out.len()) == (dtype, total)
    }
}

/// How a wait for a message ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Taken,
    /// The message had another type or length. It is consumed.
    Differs {
        dtype: DType,
        total: usize,
    },
}

struct Message {
    dtype: DType,
    bytes: Vec<u8>,
}

/// The message whose fragments are arriving.
enum Current {
    /// Into the memory of the thread that waits for it.
    Straight {
        tag: u64,
        total: usize,
        filled: usize,
    },
    Kept {
        tag: u64,
        total: usize,
        message: Message,
    },
    /// Into nothing. A thread waits for the end if `differs` says what it is.
    Dropped {
        left: usize,
        differs: Option<(DType, usize)>,
    },
}

#[derive(Default)]
pub(crate) struct Incoming {
    /// The number of the last message that has begun to arrive.
    begun: u32,
    current: Option<Current>,
    /// By tag.
    kept: HashMap<u64, VecDeque<Message>>,
    /// What the kept messages count for, with the current one if it will be kept.
    kept_bytes: usize,
}

impl Incoming {
    /// After so many messages.
    #[cfg(test)]
    pub(super) fn after(begun: u32) -> Self {
        Self { begun, ..Self::default() }
    }

    /// Whether the message that is arriving belongs to a thread, which must [`leave`](Self::leave) it before others go on.
    pub(crate) fn is_claimed(&self) -> bool {
        matches!(
            self.current,
            Some(Current::Straight { .. } | Current::Dropped { differs: Some(_), .. })
        )
    }

    /// Takes what has arrived, until `post` is served.
    pub(crate) fn advance(
        &mut self,
        source: &mut impl Source,
        mut post: Option<&mut Post<'_>>,
    ) -> Result<Option<Outcome>, Invalid> {
        for _ in 0..AT_ONCE {
            if !self.is_claimed()
                && let Some(outcome) = post.as_deref_mut().and_then(|post| self.take_kept(post))
            {
                return Ok(Some(outcome));
            }
            // Before the look: if its last fragment is not there then, it never comes.
            let is_withdrawn = self.current.is_some() && source.withdrawn() == self.begun;
            let Some(words) = source.front() else {
                if is_withdrawn {
                    self.forget_current();
                }
                return Ok(None);
            };
            let Fragment { kind, bytes } = Fragment::decode(&words)?;
            if let Kind::First { tag, dtype, total } = kind {
                self.forget_current(); // withdrawn, since another one follows
                if !self.begin(tag, dtype, total, post.as_deref()) {
                    return Ok(None);
                }
                self.begun = number_after(self.begun);
            }
            self.take(source, bytes, post.as_deref_mut())?;
            source.pop(bytes);
            if let Some(outcome) = self.finish() {
                return Ok(Some(outcome));
            }
        }
        Ok(None)
    }

    /// Decides where a message goes. False if it has to stay where it is.
    fn begin(&mut self, tag: u64, dtype: DType, total: usize, post: Option<&Post<'_>>) -> bool {
        self.current = match post.filter(|post| post.tag == tag) {
            Some(post) if post.fits(dtype, total) => {
                Some(Current::Straight { tag, total, filled: 0 })
            }
            Some(_) => Some(Current::Dropped { left: total, differs: Some((dtype, total)) }),
            None => {
                let mut bytes = Vec::new();
                let cost = total.saturating_add(OVERHEAD);
                let fits = self.kept_bytes.saturating_add(cost) <= KEPT;
                if !fits || bytes.try_reserve_exact(total).is_err() {
                    return false;
                }
                self.kept_bytes += cost;
                Some(Current::Kept { tag, total, message: Message { dtype, bytes } })
            }
        };
        true
    }

    /// Moves the data of the next fragment to where its message goes.
    fn take(
        &mut self,
        source: &mut impl Source,
        bytes: usize,
        post: Option<&mut Post<'_>>,
    ) -> Result<(), Invalid> {
        let too_much = || format!("{bytes} bytes more than the message has");
        match &mut self.current {
            None => return Err("a part of a message that has not begun".to_owned()),
            Some(Current::Straight { filled, .. }) => {
                let out = post.and_then(|post| post.out.get_mut(*filled..)?.get_mut(..bytes));
                source.read(out.ok_or_else(too_much)?);
                *filled += bytes;
            }
            Some(Current::Kept { total, message, .. }) => {
                let filled = message.bytes.len();
                if bytes > *total - filled {
                    return Err(too_much());
                }
                message.bytes.resize(filled + bytes, 0);
                source.read(&mut message.bytes[filled..]);
            }
            Some(Current::Dropped { left, .. }) => {
                *left = left.checked_sub(bytes).ok_or_else(too_much)?;
            }
        }
        Ok(())
    }

    /// Ends the current message if it is complete.
    fn finish(&mut self) -> Option<Outcome> {
        let is_whole = match &self.current {
            Some(Current::Straight { total, filled, .. }) => filled == total,
            Some(Current::Kept { total, message, .. }) => message.bytes.len() == *total,
            Some(Current::Dropped { left, .. }) => *left == 0,
            None => false,
        };
        match self.current.take_if(|_| is_whole)? {
            Current::Straight { .. } => Some(Outcome::Taken),
            Current::Kept { tag, message, .. } => {
                self.kept.entry(tag).or_default().push_back(message);
                None
            }
            Current::Dropped { differs, .. } => {
                differs.map(|(dtype, total)| Outcome::Differs { dtype, total })
            }
        }
    }

    /// The first kept message with the tag of `post`.
    pub(crate) fn take_kept(&mut self, post: &mut Post<'_>) -> Option<Outcome> {
        let messages = self.kept.get_mut(&post.tag)?;
        let Message { dtype, bytes } = messages.pop_front()?;
        if messages.is_empty() {
            self.kept.remove(&post.tag);
        }
        let total = bytes.len();
        self.kept_bytes -= total + OVERHEAD;
        if !post.fits(dtype, total) {
            return Some(Outcome::Differs { dtype, total });
        }
        post.out.copy_from_slice(&bytes);
        Some(Outcome::Taken)
    }

    /// Keeps a message of this rank to itself, if there is room.
    pub(crate) fn keep(&mut self, tag: u64, dtype: DType, data: &[u8]) -> bool {
        let cost = data.len().saturating_add(OVERHEAD);
        // One alone may be of any size, which is this rank's own choice.
        if self.kept_bytes > 0 && self.kept_bytes.saturating_add(cost) > KEPT {
            return false;
        }
        self.kept_bytes += cost;
        self.kept.entry(tag).or_default().push_back(Message { dtype, bytes: data.to_vec() });
        true
    }

    /// The thread of `post` waits no longer: what it has of a message is kept, and the rest follows there. An outcome is
    /// certain already.
    pub(crate) fn leave(&mut self, post: &Post<'_>) -> Option<Outcome> {
        match self.current.take()? {
            Current::Straight { tag, total, filled } => {
                let bytes = post.out.get(..filled).unwrap_or_default().to_vec();
                self.kept_bytes = self.kept_bytes.saturating_add(total + OVERHEAD);
                let message = Message { dtype: post.dtype, bytes };
                self.current = Some(Current::Kept { tag, total, message });
                None
            }
            Current::Dropped { left, differs } => {
                self.current = Some(Current::Dropped { left, differs: None });
                differs.map(|(dtype, total)| Outcome::Differs { dtype, total })
            }
            kept @ Current::Kept { .. } => {
                self.current = Some(kept);
                None
            }
        }
    }

    /// The current message will not be completed.
    fn forget_current(&mut self) {
        if let Some(Current::Kept { total, .. }) = self.current.take() {
            self.kept_bytes -= total + OVERHEAD;
        }
    }

    /// The tags of the messages that nobody has asked for, in ascending order.
    pub(crate) fn kept_tags(&self) -> Vec<u64> {
        let mut tags: Vec<u64> = self.kept.keys().copied().collect();
        tags.sort_unstable();
        tags
    }

    /// What the kept messages count for.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }
}
