//! The header of a fragment, as a sender writes it and a receiver checks it.

use super::MOST;
use super::ring::WORDS;
use crate::dtype::DType;

pub(crate) type Words = [u32; WORDS];

/// Bytes of a header.
pub(crate) const HEADER: usize = WORDS * 4;

const FIRST: u32 = 1;
const NEXT: u32 = 2;

/// What a fragment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The first of a message of `total` bytes.
    First { tag: u64, dtype: DType, total: usize },
    /// Another one of the message that the fragment before it belongs to.
    Next,
}

/// A fragment without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub(crate) kind: Kind,
    /// Of data.
    pub(crate) bytes: usize,
}

/// What is wrong with what a peer has sent.
pub(crate) type Invalid = String;

impl Fragment {
    pub(crate) fn encode(&self) -> Words {
        let bytes = self.bytes as u32;
        match self.kind {
            Kind::First { tag, dtype, total } => {
                let ((code, of_struct), total) = (dtype.code(), total as u64);
                let first = FIRST | u32::from(code) << 8;
                let [total_low, total_high] = [total as u32, (total >> 32) as u32];
                let [tag_low, tag_high] = [tag as u32, (tag >> 32) as u32];
                [first, bytes, total_low, total_high, tag_low, tag_high, of_struct, 0]
            }
            Kind::Next => [NEXT, bytes, 0, 0, 0, 0, 0, 0],
        }
    }

    /// Every fragment but that of an empty message has data, so a sender that sends on and on gets somewhere.
    pub(crate) fn decode(words: &Words) -> Result<Self, Invalid> {
        let invalid = || format!("an invalid message header: {words:x?}");
        let [first, bytes, total_low, total_high, tag_low, tag_high, of_struct, _] = *words;
        let wide = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let bytes = usize::try_from(bytes).ok().filter(|&bytes| bytes <= MOST);
        let bytes = bytes.ok_or_else(invalid)?;
        let kind = match (first & 0xff, (first >> 8) as usize) {
            (NEXT, 0) if bytes > 0 => Kind::Next,
            (FIRST, code) => {
                let known = code < DType::ALL.len();
                let is_struct = code == DType::ALL.len() && of_struct > 0;
                let dtype = DType::from_code(code as u8, of_struct);
                let total = usize::try_from(wide(total_low, total_high)).ok();
                let whole = |total: &usize| {
                    let fits = bytes <= *total && (bytes > 0 || *total == 0);
                    fits && total.is_multiple_of(dtype.size()) && *total <= isize::MAX as usize
                };
                let total = total.filter(|_| known || is_struct).filter(whole);
                let total = total.ok_or_else(invalid)?;
                Kind::First { tag: wide(tag_low, tag_high), dtype, total }
            }
            _ => return Err(invalid()),
        };
        Ok(Self { kind, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(tag: u64, dtype: DType, total: usize, bytes: usize) -> Fragment {
        Fragment { kind: Kind::First { tag, dtype, total }, bytes }
    }

    #[test]
    fn a_header_is_read_as_it_was_written() {
        for fragment in [
            first(u64::MAX, DType::F32, 8, 8),
            first(0, DType::Bool, 0, 0),
            first(1 << 40, DType::Struct(24), 24 << 30, MOST),
            Fragment { kind: Kind::Next, bytes: 1 },
        ] {
            let words = fragment.encode();
            assert_ne!(words[0], 0);
            assert_eq!(Fragment::decode(&words), Ok(fragment));
        }
    }

    #[test]
    fn a_header_that_no_rank_writes_is_refused() {
        let whole = first(1, DType::F32, 8, 8).encode();
        for (at, value) in [(0, 0), (0, 3), (0, 1 | 0xff << 8), (0, 1 | 1 << 16), (1, 9), (1, 0)]
            .into_iter()
            .chain([(1, MOST as u32 + 1), (1, u32::MAX), (2, 4), (2, 9), (3, u32::MAX)])
        {
            let mut words = whole;
            words[at] = value;
            assert!(Fragment::decode(&words).is_err(), "word {at} as {value:x}");
        }
        assert!(Fragment::decode(&[NEXT, 0, 0, 0, 0, 0, 0, 0]).is_err());
        let no_struct = first(1, DType::Struct(0), 0, 0).encode();
        assert!(Fragment::decode(&no_struct).is_err());
    }
}
