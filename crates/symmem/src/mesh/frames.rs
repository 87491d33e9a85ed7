//! Frames: pieces of a byte stream, each after its length.
//!
//! Anybody may send the bytes. Lengths are limited, and memory is allocated for bytes that have arrived, never for an announced
//! length.
//!
//! The rest of a frame that has begun may be received elsewhere: see [`Frames::divert`].

use std::io::IoSliceMut;
use std::ops::Range;

use super::landing::Landing;

/// Bytes of a length field.
const HEADER: usize = size_of::<u32>();

/// The received bytes of a stream, and the longest frame that is allowed.
pub(super) struct Frames {
    /// The bytes in `filled` have been received and not been taken.
    bytes: Vec<u8>,
    filled: Range<usize>,
    longest: usize,
    /// The frame whose rest is received elsewhere.
    diverted: Option<Diverted>,
    /// So much is received at once, unless more is known to come of a frame.
    at_once: usize,
    /// The room there was for bytes that were put there last, and whether there was more of it than bytes.
    room: usize,
    had_room: bool,
}

struct Diverted {
    /// The length of the frame.
    len: usize,
    place: Landing,
}

/// So much is received of the next frame while frames are being diverted: what tells where its rest goes.
const HEADS: usize = 512;
/// So much is received at once after a short frame. The rest of a long one that follows may go elsewhere.
const SHORT: usize = 12 << 10;

impl Frames {
    pub(super) fn new(longest: usize) -> Self {
        let (bytes, filled) = (vec![0; HEADER + longest], 0..0);
        let (diverted, at_once, room, had_room) = (None, SHORT, 0, false);
        Self { bytes, filled, longest, diverted, at_once, room, had_room }
    }

    /// From here on, frames may be this long, and several are received at once.
    pub(super) fn allow(&mut self, longest: usize) {
        // Zeroed pages, which take no memory before something is received there.
        let mut bytes = vec![0; 2 * (HEADER + longest)];
        if let Some(begin) = bytes.get_mut(..self.bytes.len()) {
            begin.copy_from_slice(&self.bytes);
        }
        (self.bytes, self.longest) = (bytes, longest);
    }

    /// Where to put the next bytes, first in the first part. Not empty after [`Frames::next`] has returned no frame.
    pub(super) fn space(&mut self) -> [IoSliceMut<'_>; 2] {
        // Moved only if the rest of the next frame would not fit behind what has come.
        if self.filled.is_empty() || self.filled.start + HEADER + self.longest > self.bytes.len() {
            self.bytes.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
        let most = self.begun().map_or(0, |(_, rest)| rest).max(self.at_once);
        let space = self.bytes.get_mut(self.filled.end..).unwrap_or_default();
        let len = space.len().min(most);
        let elsewhere = self.diverted.as_mut().map(|diverted| diverted.place.space());
        let parts = [elsewhere.unwrap_or_default(), space.get_mut(..len).unwrap_or_default()];
        self.room = parts.iter().map(|part| part.len()).sum();
        parts.map(IoSliceMut::new)
    }

    /// This many bytes were put there.
    pub(super) fn fill(&mut self, bytes: usize) {
        self.had_room = bytes < self.room;
        let elsewhere = match &mut self.diverted {
            Some(Diverted { place, .. }) => {
                let elsewhere = bytes.min(place.space().len());
                place.fill(elsewhere);
                elsewhere
            }
            None => 0,
        };
        self.filled.end = (self.filled.end + bytes - elsewhere).min(self.bytes.len());
    }

    /// What has come of a frame that is not complete, and how many bytes have not.
    pub(super) fn begun(&self) -> Option<(&[u8], usize)> {
        let filled = self.bytes.get(self.filled.clone()).filter(|_| self.diverted.is_none())?;
        let (header, begun) = filled.split_first_chunk::<HEADER>()?;
        let rest = (u32::from_le_bytes(*header) as usize).checked_sub(begun.len())?;
        (rest > 0).then_some((begun, rest))
    }

    /// Receives the rest of the frame that has begun there, if there is a place for exactly that, and all of it here otherwise.
    pub(super) fn divert(&mut self, place: Option<Landing>) {
        let Some((begun, rest)) = self.begun() else { return };
        let len = begun.len() + rest;
        let place = place.filter(|place| place.room() == rest);
        self.at_once = if place.is_some() { HEADS } else { usize::MAX };
        if let Some(place) = place {
            self.diverted = Some(Diverted { len, place });
            self.filled.start = self.filled.end;
        }
    }

    /// From here on, nothing is received into memory that was lent.
    pub(super) fn end_loan(&mut self) {
        if let Some(diverted) = &mut self.diverted {
            diverted.place.end_loan();
        }
    }

    /// The length of a frame whose rest has come elsewhere.
    pub(super) fn take_diverted(&mut self) -> Option<usize> {
        let complete = self.diverted.take_if(|diverted| diverted.place.room() == 0);
        complete.map(|diverted| diverted.len)
    }

    /// Whether all frames were taken, and fewer bytes were put there last than there was room for: so there were no more. Only the
    /// first time.
    pub(super) fn take_is_drained(&mut self) -> bool {
        let had_room = std::mem::take(&mut self.had_room);
        had_room && self.filled.is_empty() && self.diverted.is_none()
    }

    /// Whether [`Frames::next`] would return a frame or an error.
    pub(super) fn has_next(&self) -> bool {
        if self.diverted.is_some() {
            return false;
        }
        let filled = self.bytes.get(self.filled.clone()).unwrap_or_default();
        filled.first_chunk::<HEADER>().is_some_and(|header| {
            let len = u32::from_le_bytes(*header) as usize;
            len == 0 || len > self.longest || filled.len() >= HEADER + len
        })
    }

    /// The next complete frame; an error if no rank sends such a frame.
    pub(super) fn next(&mut self) -> Option<Result<&[u8], String>> {
        if self.diverted.is_some() {
            return None;
        }
        let filled = self.bytes.get(self.filled.clone())?;
        let header = filled.first_chunk::<HEADER>()?;
        let len = u32::from_le_bytes(*header) as usize;
        if len == 0 || len > self.longest {
            return Some(Err(format!("a frame of {len} bytes")));
        }
        let frame = filled.get(HEADER..HEADER + len)?;
        self.filled.start += HEADER + len;
        if len < SHORT {
            self.at_once = SHORT;
        }
        Some(Ok(frame))
    }
}

/// The length field of a frame of these parts; `None` if the frame is too long for it.
pub(super) fn length(parts: &[&[u8]]) -> Option<[u8; HEADER]> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    u32::try_from(len).ok().filter(|&len| len > 0).map(u32::to_le_bytes)
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
    use super::super::landing::trial;
    use super::*;
    use crate::memory::region::Region;

    const LONGEST: usize = 300;

    impl Frames {
        fn feed(&mut self, bytes: &[u8]) {
            self.space()[1][..bytes.len()].copy_from_slice(bytes);
            self.fill(bytes.len());
        }
    }

    /// All frames of `bytes`, fed in pieces of `piece`.
    fn cut(bytes: &[u8], piece: usize) -> Result<Vec<Vec<u8>>, String> {
        let (mut frames, mut all) = (Frames::new(LONGEST), Vec::new());
        let mut rest = bytes;
        while !rest.is_empty() {
            let space = frames.space()[1].len();
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

    /// As `cut`; the rest of each frame of more than 50 bytes, of which so many have come, is received elsewhere.
    fn cut_and_divert(bytes: &[u8], piece: usize) -> Vec<Vec<u8>> {
        let (mut frames, mut all) = (Frames::new(LONGEST), Vec::new());
        let (mut rest, mut elsewhere) = (bytes, None);
        while !rest.is_empty() || elsewhere.is_some() {
            if let Some(len) = frames.take_diverted() {
                let (begun, memory): (Vec<u8>, Region) = elsewhere.take().unwrap();
                all.push([begun, trial::read(&memory)].concat());
                assert_eq!(all.last().unwrap().len(), len);
                continue;
            }
            while let Some(frame) = frames.next() {
                all.push(frame.unwrap().to_vec());
            }
            if let Some((begun, missing)) = frames.begun().filter(|(begun, _)| begun.len() > 50) {
                let (place, memory) = trial::place(missing);
                elsewhere = Some((begun.to_vec(), memory));
                frames.divert(Some(place));
                assert!(frames.begun().is_none() && !frames.has_next());
            }
            let fed = piece.min(rest.len());
            let mut left = fed;
            for part in &mut frames.space() {
                let len = left.min(part.len());
                part[..len].copy_from_slice(&rest[..len]);
                (rest, left) = (&rest[len..], left - len);
            }
            frames.fill(fed - left);
        }
        while let Some(frame) = frames.next() {
            all.push(frame.unwrap().to_vec());
        }
        all
    }

    #[test]
    fn a_frame_whose_rest_goes_elsewhere_is_whole_however_it_is_cut() {
        let sent: Vec<Vec<u8>> = [200, 3, 60, LONGEST, LONGEST, 1, 255]
            .map(|len| (0..len).map(|i| i as u8).collect())
            .to_vec();
        let mut bytes = Vec::new();
        assert!(sent.iter().all(|frame| append(&mut bytes, &[frame])));
        for piece in [1, 2, 3, 51, 60, 100, 299, 302, 1000] {
            assert_eq!(cut_and_divert(&bytes, piece), sent, "{piece}");
        }
    }

    #[test]
    fn a_place_of_another_size_than_the_rest_of_the_frame_is_not_used() {
        let (sent, mut bytes) = (vec![7; 200], Vec::new());
        assert!(append(&mut bytes, &[&sent]));
        for size in [0, 1, 99, 101, 300] {
            let mut frames = Frames::new(LONGEST);
            frames.feed(&bytes[..HEADER + 100]);
            assert_eq!(frames.begun().unwrap().1, 100);
            let (place, memory) = trial::place(size);
            frames.divert(Some(place));
            frames.feed(&bytes[HEADER + 100..]);
            assert_eq!(frames.next().unwrap().unwrap(), sent, "{size}");
            assert!(
                frames.take_diverted().is_none() && trial::read(&memory).iter().all(|b| *b == 0)
            );
        }
    }

    #[test]
    fn while_frames_go_elsewhere_little_is_received_here_until_one_does_not() {
        let (mut frames, mut bytes) = (Frames::new(LONGEST), Vec::new());
        frames.allow(5000);
        assert!(append(&mut bytes, &[&[7; 4000]]));
        frames.feed(&bytes[..100]);
        frames.divert(Some(trial::place(3900 + HEADER).0));
        assert_eq!(frames.space().map(|part| part.len()), [3900 + HEADER, HEADS]);
        frames.fill(3900 + HEADER);
        assert_eq!(frames.take_diverted(), Some(4000));
        frames.feed(&bytes[..HEADS]);
        assert_eq!(frames.space().map(|part| part.len()), [0, 4000 + HEADER - HEADS]);
        frames.divert(None);
        assert!(frames.space()[1].len() >= 4000);
    }

    #[test]
    fn after_a_short_frame_little_is_received_until_more_is_known_to_come() {
        let (mut frames, mut bytes) = (Frames::new(LONGEST), Vec::new());
        frames.allow(20_000);
        let room = |frames: &mut Frames| frames.space()[1].len();
        assert_eq!(room(&mut frames), SHORT);
        assert!(append(&mut bytes, &[&[7; 15_000]]) && append(&mut bytes, &[&[7; 10]]));
        frames.feed(&bytes[..100]);
        assert_eq!(room(&mut frames), 15_000 + HEADER - 100);
        frames.divert(None);
        frames.feed(&bytes[100..15_000 + HEADER]);
        assert!(frames.next().is_some() && room(&mut frames) > 20_000);
        frames.feed(&bytes[15_000 + HEADER..]);
        assert!(frames.next().is_some());
        assert_eq!(room(&mut frames), SHORT);
    }

    #[test]
    fn lengths_out_of_bounds_are_refused_and_take_no_memory() {
        for len in [0, LONGEST as u32 + 1, u16::MAX.into(), u32::MAX] {
            let mut frames = Frames::new(LONGEST);
            frames.feed(&len.to_le_bytes());
            let e = frames.next().unwrap().unwrap_err();
            assert!(e.contains(&format!("{len} bytes")), "{e}");
            assert_eq!(frames.bytes.len(), HEADER + LONGEST);
        }
    }

    #[test]
    fn an_empty_frame_is_not_appended() {
        let mut bytes = vec![7];
        assert!(!append(&mut bytes, &[&[]]));
        assert_eq!(bytes, [7]);
    }

    #[test]
    fn a_bound_may_be_raised_between_two_frames() {
        let (mut frames, mut bytes) = (Frames::new(4), Vec::new());
        assert!(append(&mut bytes, &[&[1; 4]]) && append(&mut bytes, &[&[2; 90]]));
        frames.feed(&bytes[..HEADER + 4]);
        assert_eq!(frames.next().unwrap().unwrap(), [1; 4]);
        frames.allow(90);
        frames.feed(&bytes[HEADER + 4..]);
        assert_eq!(frames.next().unwrap().unwrap(), [2; 90]);
        assert!(frames.next().is_none());
    }
}
