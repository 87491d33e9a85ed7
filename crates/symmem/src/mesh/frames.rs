//! Frames: pieces of a byte stream, each after its length.
//!
//! Anybody may send the bytes. Lengths are limited, and memory is allocated for bytes that have arrived, never for an announced
//! length.

use std::ops::Range;

/// Bytes of a length field.
const HEADER: usize = size_of::<u16>();

/// The received bytes of a stream, and the longest frame that is allowed.
pub(super) struct Frames {
    /// The bytes in `filled` have been received and not been taken.
    bytes: Vec<u8>,
    filled: Range<usize>,
    longest: usize,
    /// There was room for more when bytes were put there last.
    had_room: bool,
}

impl Frames {
    pub(super) fn new(longest: usize) -> Self {
        Self { bytes: vec![0; HEADER + longest], filled: 0..0, longest, had_room: false }
    }

    /// From here on, frames may be this long, and several are received at once.
    pub(super) fn allow(&mut self, longest: usize) {
        self.bytes.resize(2 * (HEADER + longest), 0);
        self.longest = longest;
    }

    /// Where to put the next bytes. Not empty after [`Frames::next`] has returned no frame.
    pub(super) fn space(&mut self) -> &mut [u8] {
        // Moved only if the rest of the next frame would not fit behind what has come.
        if self.filled.is_empty() || self.filled.start + HEADER + self.longest > self.bytes.len() {
            self.bytes.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
        self.bytes.get_mut(self.filled.end..).unwrap_or_default()
    }

    /// This many bytes were put there.
    pub(super) fn fill(&mut self, bytes: usize) {
        self.filled.end = (self.filled.end + bytes).min(self.bytes.len());
        self.had_room = self.filled.end < self.bytes.len();
    }

    /// Whether all frames were taken, and fewer bytes were put there last than there was room for: so there were no more. Only the
    /// first time.
    pub(super) fn take_is_drained(&mut self) -> bool {
        std::mem::take(&mut self.had_room) && self.filled.is_empty()
    }

    /// Whether [`Frames::next`] would return a frame or an error.
    pub(super) fn has_next(&self) -> bool {
        let filled = self.bytes.get(self.filled.clone()).unwrap_or_default();
        filled.first_chunk::<HEADER>().is_some_and(|header| {
            let len = usize::from(u16::from_le_bytes(*header));
            len == 0 || len > self.longest || filled.len() >= HEADER + len
        })
    }

    /// The next complete frame; an error if no rank sends such a frame.
    pub(super) fn next(&mut self) -> Option<Result<&[u8], String>> {
        let filled = self.bytes.get(self.filled.clone())?;
        let header = filled.first_chunk::<HEADER>()?;
        let len = usize::from(u16::from_le_bytes(*header));
        if len == 0 || len > self.longest {
            return Some(Err(format!("a frame of {len} bytes")));
        }
        let frame = filled.get(HEADER..HEADER + len)?;
        self.filled.start += HEADER + len;
        Some(Ok(frame))
    }
}

/// The length field of a frame of these parts; `None` if the frame is too long for it.
pub(super) fn length(parts: &[&[u8]]) -> Option<[u8; HEADER]> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    u16::try_from(len).ok().filter(|&len| len > 0).map(u16::to_le_bytes)
}

/// Appends a frame of these parts to `bytes`. If it is too long for a length field, appends nothing and returns false.
pub(super) fn append(bytes: &mut Vec<u8>, parts: &[&[u8]]) -> bool {
    let Some(length) = length(parts) else { return false };
    bytes.extend_from_slice(&length);
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: usize = 300;

    impl Frames {
        fn feed(&mut self, bytes: &[u8]) {
            self.space()[..bytes.len()].copy_from_slice(bytes);
            self.fill(bytes.len());
        }
    }

    /// All frames of `bytes`, fed in pieces of `piece`.
    fn cut(bytes: &[u8], piece: usize) -> Result<Vec<Vec<u8>>, String> {
        let (mut frames, mut all) = (Frames::new(LONGEST), Vec::new());
        let mut rest = bytes;
        while !rest.is_empty() {
            let space = frames.space().len();
            let (now, later) = rest.split_at(piece.min(space).min(rest.len()));
            assert!(!now.is_empty(), "no room, and no frame");
            frames.feed(now);
            rest = later;
            while let Some(frame) = frames.next() {
                all.push(frame?.to_vec());
            }
            assert!(frames.filled.len() < HEADER + LONGEST);
        }
        Ok(all)
    }

    #[test]
    fn frames_come_out_as_they_went_in_however_they_are_cut() {
        let sent: Vec<Vec<u8>> =
            [1, 2, 255, 256, LONGEST].map(|len| (0..len).map(|i| i as u8).collect()).to_vec();
        let mut bytes = Vec::new();
        assert!(sent.iter().all(|frame| append(&mut bytes, &[frame])));
        for piece in [1, 2, 3, 7, 299, 302, 1000] {
            assert_eq!(cut(&bytes, piece).unwrap(), sent, "{piece}");
        }
    }

    #[test]
    fn lengths_out_of_bounds_are_refused_and_take_no_memory() {
        for len in [0, LONGEST as u16 + 1, u16::MAX] {
            let mut frames = Frames::new(LONGEST);
            frames.feed(&len.to_le_bytes());
            let e = frames.next().unwrap().unwrap_err();
            assert!(e.contains(&format!("{len} bytes")), "{e}");
            assert_eq!(frames.bytes.len(), HEADER + LONGEST);
        }
    }

    #[test]
    fn nothing_is_appended_that_no_length_can_say() {
        let mut bytes = vec![7];
        assert!(!append(&mut bytes, &[&[]]) && !append(&mut bytes, &[&vec![0; 1 << 16]]));
        assert_eq!(bytes, [7]);
    }

    #[test]
    fn a_bound_may_be_raised_between_two_frames() {
        let (mut frames, mut bytes) = (Frames::new(4), Vec::new());
        assert!(append(&mut bytes, &[&[1; 4]]) && append(&mut bytes, &[&[2; 90]]));
        frames.feed(&bytes[..6]);
        assert_eq!(frames.next().unwrap().unwrap(), [1; 4]);
        frames.allow(90);
        frames.feed(&bytes[6..]);
        assert_eq!(frames.next().unwrap().unwrap(), [2; 90]);
        assert!(frames.next().is_none());
    }
}
