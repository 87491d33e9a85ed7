//! For `fuzz/`: what a stranger, or a rank of another host, sends over TCP.

use super::frames::Frames;
use super::handshake;
use super::socket::Packet;
use super::stream::SHORT;

/// Takes in `input` in pieces of so many bytes, as from somebody who has not shown who it is: its frames, which must be the same
/// however they are cut, and what they would say.
pub fn frames(piece: usize, input: &[u8]) {
    let cut = read(piece.max(1), input);
    assert_eq!(cut, read(usize::MAX, input), "cut into pieces of {piece}");
    for frame in cut.iter().flatten() {
        handshake::fuzz_opening(frame);
        if let Ok(packet) = postcard::from_bytes::<Packet>(frame) {
            drop(packet.fabric());
        }
    }
}

/// The frames, up to the first that is none.
fn read(piece: usize, input: &[u8]) -> Vec<Result<Vec<u8>, String>> {
    let (mut frames, mut all, mut rest) = (Frames::new(SHORT), Vec::new(), input);
    loop {
        while let Some(frame) = frames.next() {
            all.push(frame.map(<[u8]>::to_vec));
            if all.last().is_some_and(Result::is_err) {
                return all;
            }
        }
        if rest.is_empty() {
            return all;
        }
        let space = frames.space();
        let (now, later) = rest.split_at(piece.min(space.len()).min(rest.len()));
        assert!(!now.is_empty(), "no room, and no frame");
        space[..now.len()].copy_from_slice(now);
        frames.fill(now.len());
        rest = later;
    }
}
