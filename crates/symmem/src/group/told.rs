//! What ranks of different hosts tell each other for a group.

use serde::{Deserialize, Serialize};

use crate::signal::News;

/// One message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Told<'a> {
    /// What happens in the pads.
    News(News),
    /// A piece of what it stages for exchange `epoch`, from byte `at` of its staging buffer on.
    Staged { epoch: u32, at: usize, bytes: Whole<'a> },
    /// Bytes for our part of the memory of rendezvous `memory`, from byte `at` on, touched by atomics of `unit` bytes.
    Put { memory: u64, at: usize, unit: u8, bytes: Whole<'a> },
    /// Something to do there of which it wants to know the result.
    Ask { ticket: u64, memory: u64, at: usize, unit: u8, ask: Ask },
    /// The result, or why there is none.
    Answer {
        ticket: u64,
        #[serde(borrow)]
        answer: Result<Whole<'a>, String>,
    },
    /// Why a `Put` was not done.
    Refused { memory: u64, why: String },
}

/// Bytes that are written as one, and not as a list of numbers, which would take far longer.
#[derive(Clone, Copy)]
pub(super) struct Whole<'a>(pub(super) &'a [u8]);

impl Serialize for Whole<'_> {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(self.0)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Whole<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        <&[u8]>::deserialize(from).map(Self)
    }
}

impl std::fmt::Debug for Whole<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// What a rank asks for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// So many bytes.
    Read(usize),
    /// To add this, wrapping, to an integer of `unit` bytes, and what was there before.
    Add(u64),
    /// To replace `expected` by `new`, and what was there before.
    Swap { expected: u64, new: u64 },
}

/// What a message with so many bytes at its end begins with; of the others, all of it.
pub(super) fn encode_head(told: &Told<'_>, bytes: usize) -> Vec<u8> {
    let mut head = encode(told);
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

pub(super) fn encode(told: &Told<'_>) -> Vec<u8> {
    // Fails only for types that cannot be serialised at all.
    postcard::to_stdvec(told).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_and_the_bytes_behind_it_are_the_message() {
        for len in [0, 1, 127, 128, 300, 16_383, 16_384, 60_000] {
            let (bytes, none) = (vec![7; len], Whole(&[]));
            let staged = |bytes| Told::Staged { epoch: 300, at: 1 << 14, bytes };
            let put = |bytes| Told::Put { memory: 9, at: 77, unit: 8, bytes };
            for (head, all) in [
                (encode_head(&staged(none), len), encode(&staged(Whole(&bytes)))),
                (encode_head(&put(none), len), encode(&put(Whole(&bytes)))),
            ] {
                assert_eq!([&head[..], &bytes].concat(), all, "{len} bytes");
            }
        }
    }
}
