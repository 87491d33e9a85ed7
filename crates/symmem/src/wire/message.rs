//! The header of an active message.

/// Bytes of the header without a message in it.
pub(super) const LEN: usize = 45;
/// The most bytes of a message in the header itself.
pub(super) const SHORT: usize = symmem_sys::ucx::MAX_HEADER - LEN;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A message for a group, in the header.
    Short,
    /// A message for a group, in the body.
    Long,
    /// Empty. The receiver acknowledges it at once.
    Last,
    /// An acknowledgement. It has no number.
    Credit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Identifies the world: messages of other processes do not have it.
    pub(super) tag: u64,
    /// The sender.
    pub(super) from: u32,
    pub(super) kind: Kind,
    /// The number of the message among those from its sender to its receiver.
    pub(super) sequence: u64,
    /// Acknowledges how much the sender has received from the receiver.
    pub(super) taken: u64,
    pub(super) group: u128,
}

impl Header {
    /// The header with a message in it.
    pub(super) fn encode(&self, bytes: &[u8]) -> Vec<u8> {
        let mut all = Vec::with_capacity(LEN + bytes.len());
        all.extend(self.tag.to_le_bytes());
        all.extend(self.from.to_le_bytes());
        all.push(self.kind as u8);
        all.extend(self.sequence.to_le_bytes());
        all.extend(self.taken.to_le_bytes());
        all.extend(self.group.to_le_bytes());
        all.extend(bytes);
        all
    }

    pub(super) fn decode(all: &[u8]) -> Option<(Self, &[u8])> {
        let mut rest = all;
        let tag = u64::from_le_bytes(take(&mut rest)?);
        let from = u32::from_le_bytes(take(&mut rest)?);
        let [kind] = take(&mut rest)?;
        let kinds = [Kind::Short, Kind::Long, Kind::Last, Kind::Credit];
        let kind = kinds.into_iter().find(|known| *known as u8 == kind)?;
        let sequence = u64::from_le_bytes(take(&mut rest)?);
        let taken = u64::from_le_bytes(take(&mut rest)?);
        let group = u128::from_le_bytes(take(&mut rest)?);
        Some((Self { tag, from, kind, sequence, taken, group }, rest))
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, others) = rest.split_first_chunk()?;
    *rest = others;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written_and_only_whole() {
        let header =
            Header { tag: 1, from: 2, kind: Kind::Last, sequence: 3, taken: 4, group: 5 << 70 };
        let all = header.encode(b"bytes");
        assert_eq!(all.len(), LEN + 5);
        assert_eq!(Header::decode(&all), Some((header, &b"bytes"[..])));
        assert!((0..LEN).all(|len| Header::decode(&all[..len]).is_none()));
        let mut unknown = all;
        unknown[12] = 9;
        assert_eq!(Header::decode(&unknown), None);
    }
}
