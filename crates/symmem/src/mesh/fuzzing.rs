//! For `fuzz/`: what a stranger, or a rank of another host, sends over TCP.

use super::frames::Frames;
use super::handshake;
use super::landing::trial;
use super::socket::Packet;
use super::stream::SHORT;
use crate::memory::region::Region;

/// Takes in `input` in pieces of so many bytes, as from somebody who has not shown who it is: its frames, which must be the same
/// however they are cut, and what they would say.
pub fn frames(piece: usize, input: &[u8]) {
    let cut = read(piece.max(1), input, usize::MAX);
    assert_eq!(cut, read(usize::MAX, input, usize::MAX), "cut into pieces of {piece}");
    for from in [1, 17, 60] {
        let elsewhere = read(piece.max(1), input, from);
        assert_eq!(cut, elsewhere, "cut into pieces of {piece}, and elsewhere from {from} on");
    }
    for frame in cut.iter().flatten() {
        handshake::fuzz_opening(frame);
        if let Ok(packet) = postcard::from_bytes::<Packet>(frame) {
            drop(packet.fabric());
        }
    }
}

/// The frames, up to the first that is none. The rest of one of which so many bytes have come is received elsewhere.
fn read(piece: usize, input: &[u8], elsewhere_from: usize) -> Vec<Result<Vec<u8>, String>> {
    let (mut frames, mut all, mut rest) = (Frames::new(SHORT), Vec::new(), input);
    let mut elsewhere: Option<(Vec<u8>, Region)> = None;
    loop {
        if let Some(len) = frames.take_diverted() {
            let (begun, memory) = elsewhere.take().expect("a frame was diverted");
            let frame = [begun, trial::read(&memory)].concat();
            assert_eq!(frame.len(), len);
            all.push(Ok(frame));
        }
        while let Some(frame) = frames.next() {
            all.push(frame.map(<[u8]>::to_vec));
            if all.last().is_some_and(Result::is_err) {
                return all;
            }
        }
        if rest.is_empty() {
            return all;
        }
        if let Some((begun, missing)) = frames.begun()
            && begun.len() >= elsewhere_from
        {
            let (place, memory) = trial::place(missing);
            elsewhere = Some((begun.to_vec(), memory));
            frames.divert(Some(place));
        }
        let fed = piece.min(rest.len());
        let mut left = fed;
        for part in &mut frames.space() {
            let len = left.min(part.len());
            let (now, later) = rest.split_at(len);
            part[..len].copy_from_slice(now);
            (rest, left) = (later, left - len);
        }
        assert!(left < fed, "no room, and no frame");
        frames.fill(fed - left);
    }
}
