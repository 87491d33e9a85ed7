//! The messages that members of a group on different hosts send each other.

use serde::{Deserialize, Serialize};

use crate::p2p;
use crate::signal::PadUpdate;

/// One message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FarMessage<'a> {
    /// A change to a pad.
    Pad(PadUpdate),
    /// A piece of what the sender stages for exchange `epoch`, from byte `at` of its staging buffer on.
    Staged { epoch: u32, at: usize, bytes: RawBytes<'a> },
    /// Data for the receiver's part of the memory of rendezvous `memory`, from byte `at` on, stored by atomics of `unit` bytes.
    Put { memory: u64, at: usize, unit: u8, bytes: RawBytes<'a> },
    /// An operation on that memory whose result the sender waits for.
    Request { ticket: u64, memory: u64, at: usize, unit: u8, request: Request },
    /// The result of a request, or why there is none.
    Reply {
        ticket: u64,
        #[serde(borrow)]
        reply: Result<RawBytes<'a>, String>,
    },
    /// Why a `Put` was not executed.
    Refused { memory: u64, why: String },
    /// A part of a message from one rank to another.
    Fragment { header: p2p::Words, bytes: RawBytes<'a> },
    /// How much of such parts the sender of this has taken.
    FragmentsTaken { total: u64 },
    /// The message of this number will not be completed.
    Withdrawn { number: u32 },
}

/// What a [`FarMessage::Staged`] begins with.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StagedHead {
    pub(super) epoch: u32,
    pub(super) at: usize,
    pub(super) bytes: usize,
}

impl StagedHead {
    /// That of a message which has come in part, and what of its bytes has.
    pub(super) fn read(beginning: &[u8]) -> Option<(Self, &[u8])> {
        /// The place of the variant in the enum.
        const STAGED: u32 = 1;
        let (variant, rest) = postcard::take_from_bytes::<u32>(beginning).ok()?;
        let ((epoch, at, bytes), rest) = postcard::take_from_bytes(rest).ok()?;
        (variant == STAGED).then_some((Self { epoch, at, bytes }, rest))
    }
}

/// Bytes that are serialised in one piece. As a list of numbers they would take far longer.
#[derive(Clone, Copy)]
pub(super) struct RawBytes<'a>(pub(super) &'a [u8]);

impl Serialize for RawBytes<'_> {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(self.0)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for RawBytes<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        <&[u8]>::deserialize(from).map(Self)
    }
}

impl std::fmt::Debug for RawBytes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// An operation on a peer's memory that returns something.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Returns this many bytes.
    Read(usize),
    /// Adds this, wrapping, to an integer of `unit` bytes, and returns its previous value.
    Add(u64),
    /// Replaces `expected` by `new`, and returns the previous value.
    Swap { expected: u64, new: u64 },
}

/// Room for a message but for its bytes: growing would take longer than writing it.
const HEAD: usize = 96;

/// What a message with so many bytes at its end begins with; of other messages, all of it.
pub(super) fn encode_head(message: &FarMessage<'_>, bytes: usize) -> Vec<u8> {
    let mut head = encode(message);
    if bytes > 0 {
        head.pop(); // the length of no bytes
        let mut length = bytes;
        while length >= 0x80 {
            head.push(length as u8 | 0x80);
            length >>= 7;
        }
        head.push(length as u8);
    }
    head
}

pub(super) fn encode(message: &FarMessage<'_>) -> Vec<u8> {
    let bytes = match message {
        FarMessage::Put { bytes, .. }
        | FarMessage::Staged { bytes, .. }
        | FarMessage::Fragment { bytes, .. } => bytes.0.len(),
        _ => 0,
    };
    // Fails only for types that cannot be serialised at all.
    postcard::to_extend(message, Vec::with_capacity(HEAD + bytes)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_and_the_bytes_after_it_are_the_message() {
        for len in [0, 1, 127, 128, 300, 16_383, 16_384, 60_000] {
            let (bytes, none) = (vec![7; len], RawBytes(&[]));
            let staged = |bytes| FarMessage::Staged { epoch: 300, at: 1 << 14, bytes };
            let put = |bytes| FarMessage::Put { memory: 9, at: 77, unit: 8, bytes };
            let part = |bytes| FarMessage::Fragment { header: [300; 8], bytes };
            for (head, all) in [
                (encode_head(&staged(none), len), encode(&staged(RawBytes(&bytes)))),
                (encode_head(&put(none), len), encode(&put(RawBytes(&bytes)))),
                (encode_head(&part(none), len), encode(&part(RawBytes(&bytes)))),
            ] {
                assert_eq!([&head[..], &bytes].concat(), all, "{len} bytes");
            }
        }
    }

    #[test]
    fn the_head_of_what_is_staged_can_be_read_as_soon_as_it_is_there_and_no_other() {
        let bytes = vec![7; 60_000];
        let staged =
            encode(&FarMessage::Staged { epoch: 300, at: 1 << 14, bytes: RawBytes(&bytes) });
        let head = staged.len() - bytes.len();
        for len in 0..staged.len() {
            let read = StagedHead::read(&staged[..len]);
            let expected = StagedHead { epoch: 300, at: 1 << 14, bytes: bytes.len() };
            match len < head {
                true => assert_eq!(read, None, "{len} bytes"),
                false => assert_eq!(read, Some((expected, &bytes[..len - head])), "{len} bytes"),
            }
        }
        let put = FarMessage::Put { memory: 9, at: 77, unit: 8, bytes: RawBytes(&bytes) };
        assert_eq!(StagedHead::read(&encode(&put)), None);
        let refused = FarMessage::Refused { memory: 9, why: "no".into() };
        assert_eq!(StagedHead::read(&encode(&refused)), None);
    }
}
