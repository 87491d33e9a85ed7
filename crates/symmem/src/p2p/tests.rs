//! How messages are put together, step by step.

use super::incoming::{Incoming, KEPT, Outcome, Post};
use super::scripted::{Scripted, VALUE};
use super::{Fragment, Kind, MOST};
use crate::dtype::DType;

const TAKEN: Result<Option<Outcome>, String> = Ok(Some(Outcome::Taken));

impl Scripted {
    fn first(&mut self, tag: u64, total: usize, bytes: usize) {
        let kind = Kind::First { tag, dtype: DType::U8, total };
        self.fragments.push_back(Fragment { kind, bytes }.encode());
    }

    fn next(&mut self, bytes: usize) {
        self.fragments.push_back(Fragment { kind: Kind::Next, bytes }.encode());
    }

    /// A message in fragments of the usual length.
    fn whole(&mut self, tag: u64, total: usize) {
        self.first(tag, total, total.min(MOST));
        let mut left = total - total.min(MOST);
        while left > 0 {
            self.next(left.min(MOST));
            left -= left.min(MOST);
        }
    }
}

fn post(tag: u64, out: &mut [u8]) -> Post<'_> {
    Post { tag, dtype: DType::U8, out }
}

/// Receives a message that is here, or is put together from what is here.
fn received(incoming: &mut Incoming, source: &mut Scripted, tag: u64, len: usize) -> bool {
    let mut out = vec![0; len];
    let mut post = post(tag, &mut out);
    for _ in 0..1000 {
        if incoming.advance(source, Some(&mut post)) == TAKEN {
            return out.iter().all(|byte| *byte == VALUE);
        }
    }
    incoming.leave(&post);
    false
}

#[test]
fn a_thread_that_gives_up_leaves_the_message_to_the_next() {
    let (mut incoming, mut source) = (Incoming::default(), Scripted::default());
    source.first(1, 10, 4);
    let mut out = [0; 10];
    let mut waiting = post(1, &mut out);
    assert_eq!(incoming.advance(&mut source, Some(&mut waiting)), Ok(None));
    assert!(incoming.is_claimed());
    assert_eq!(incoming.leave(&waiting), None);
    source.next(5);
    assert_eq!(incoming.advance(&mut source, None), Ok(None));
    assert!(incoming.kept_tags().is_empty(), "it is not complete");
    source.next(1);
    source.first(1, 3, 3);
    assert!(received(&mut incoming, &mut source, 1, 10));
    assert!(received(&mut incoming, &mut source, 1, 3));
    assert_eq!(incoming.kept_bytes(), 0);
}

#[test]
fn a_message_that_is_withdrawn_leaves_nothing_behind() {
    for was_seen in [false, true] {
        for is_claimed in [false, true] {
            let (mut incoming, mut source) = (Incoming::default(), Scripted::default());
            source.whole(1, 2);
            source.first(1, 10, 4);
            let mut out = [0; 2];
            assert_eq!(incoming.advance(&mut source, Some(&mut post(1, &mut out))), TAKEN);
            let mut out = [0; 10];
            let mut waiting = post(1, &mut out);
            let waiting = is_claimed.then_some(&mut waiting);
            assert_eq!(incoming.advance(&mut source, waiting), Ok(None));
            if was_seen {
                source.withdrawn = 2; // the second message, and nothing else comes
                assert_eq!(incoming.advance(&mut source, None), Ok(None));
                assert!(!incoming.is_claimed() && incoming.kept_bytes() == 0);
            }
            source.withdrawn = 2;
            source.whole(1, 10);
            assert!(received(&mut incoming, &mut source, 1, 10));
            assert_eq!((incoming.kept_bytes(), incoming.kept_tags()), (0, vec![]));
        }
    }
}

#[test]
fn numbers_that_come_again_withdraw_nothing() {
    // The message that was withdrawn long ago had the number that this one has, or none was.
    for begun in [u32::MAX, u32::MAX - 1, 0] {
        let (mut incoming, mut source) = (Incoming::after(begun), Scripted::default());
        source.first(1, 10, 4);
        assert_eq!(incoming.advance(&mut source, None), Ok(None));
        assert_eq!(incoming.advance(&mut source, None), Ok(None));
        source.next(6);
        assert!(received(&mut incoming, &mut source, 1, 10));
        source.first(1, 10, 4);
        assert_eq!(incoming.advance(&mut source, None), Ok(None));
        source.withdrawn = super::number_after(super::number_after(begun));
        assert_eq!(incoming.advance(&mut source, None), Ok(None));
        assert_eq!(incoming.kept_bytes(), 0, "the one that was withdrawn");
    }
}

#[test]
fn a_ring_names_what_was_withdrawn_until_another_message_begins() {
    use super::{Mapped, RING_BYTES, Reader, Writer};
    let region = crate::memory::Region::anonymous(RING_BYTES).unwrap();
    let mapped = || Mapped::new(&region).unwrap();
    let (mut to, mut from) = (Writer::new(mapped()), Reader::new(mapped()));
    assert!(to.has_room(MOST) && !to.has_room(RING_BYTES));
    to.push(&[1, 4, 0, 0, 0, 0, 0, 0], &[7; 4]);
    assert_eq!(from.withdrawn(), 0);
    to.withdraw(5);
    assert_eq!(from.withdrawn(), 5);
    to.push(&[2, 3, 0, 0, 0, 0, 0, 0], &[8; 3]);
    assert_eq!(from.withdrawn(), 0);
    for (first, data) in [(1, vec![7; 4]), (2, vec![8; 3])] {
        assert_eq!(from.front().map(|header| header[0]), Some(first));
        let mut out = vec![0; data.len()];
        from.read(&mut out);
        assert_eq!(out, data);
        from.pop(out.len());
    }
    assert!(from.front().is_none());
}

/// Fragments of all lengths, around the end of the ring many times.
#[test]
fn a_ring_gives_back_what_was_written() {
    use super::{Mapped, RING_BYTES, Reader, Writer};
    let region = crate::memory::Region::anonymous(RING_BYTES).unwrap();
    let mapped = || Mapped::new(&region).unwrap();
    let (mut to, mut from) = (Writer::new(mapped()), Reader::new(mapped()));
    let len = |i: usize| (i * 7919) % (MOST + 1);
    let byte = |i: usize, at: usize| (i * 31 + at * 7) as u8;
    let (mut written, mut read) = (0, 0);
    while read < 500 {
        while to.has_room(len(written)) {
            let data: Vec<u8> = (0..len(written)).map(|at| byte(written, at)).collect();
            to.push(&[1, data.len() as u32, 0, 0, 0, 0, 0, written as u32], &data);
            written += 1;
        }
        assert!(written > read + 5, "nearly empty and yet no room");
        for _ in 0..1 + read % 5 {
            let header = from.front().unwrap();
            assert_eq!((header[1] as usize, header[7] as usize), (len(read), read));
            let mut out = vec![0; len(read)];
            from.read(&mut out);
            assert!((0..out.len()).all(|at| out[at] == byte(read, at)), "fragment {read}");
            from.pop(out.len());
            read += 1;
        }
    }
}

#[test]
fn what_does_not_fit_stays_with_its_sender_until_there_is_room() {
    let (mut incoming, mut source) = (Incoming::default(), Scripted::default());
    let half = KEPT / 2;
    for tag in [1, 1, 2] {
        source.whole(tag, half - 1000);
    }
    source.whole(3, 8);
    while incoming.advance(&mut source, None) == Ok(None) && incoming.kept_tags() != [1] {}
    assert!(!received(&mut incoming, &mut source, 3, 8), "the message before it fits nowhere");
    assert!(incoming.kept_bytes() <= KEPT);
    assert!(received(&mut incoming, &mut source, 1, half - 1000));
    assert!(received(&mut incoming, &mut source, 3, 8));
    assert!(received(&mut incoming, &mut source, 1, half - 1000));
    assert!(received(&mut incoming, &mut source, 2, half - 1000));
    // One that a thread waits for needs no room.
    source.whole(4, 2 * KEPT);
    assert!(received(&mut incoming, &mut source, 4, 2 * KEPT));
    assert_eq!(incoming.kept_bytes(), 0);
}

#[test]
fn empty_messages_count_towards_the_bound() {
    let (mut incoming, mut source) = (Incoming::default(), Scripted::default());
    for _ in 0..KEPT / 64 + 10 {
        source.whole(1, 0);
    }
    (0..KEPT / 64).for_each(|_| assert_eq!(incoming.advance(&mut source, None), Ok(None)));
    assert_eq!(source.fragments.len(), 10);
}

#[test]
fn a_message_that_does_not_fit_its_receiver_is_consumed() {
    let (mut incoming, mut source) = (Incoming::default(), Scripted::default());
    source.first(1, 10, 4);
    let mut out = [0; 9];
    let mut waiting = post(1, &mut out);
    assert_eq!(incoming.advance(&mut source, Some(&mut waiting)), Ok(None));
    assert!(incoming.is_claimed(), "the rest is still to come");
    let differs = Outcome::Differs { dtype: DType::U8, total: 10 };
    assert_eq!(incoming.leave(&waiting), Some(differs), "whatever becomes of the rest");
    source.next(6);
    source.whole(1, 9);
    assert!(received(&mut incoming, &mut source, 1, 9));
}

#[test]
fn fragments_that_no_rank_sends_are_refused() {
    let refused = |script: fn(&mut Scripted)| {
        for claims in [false, true] {
            let (mut incoming, mut source) = (Incoming::default(), Scripted::default());
            script(&mut source);
            let mut out = [0; 10];
            let mut waiting = post(1, &mut out);
            // A whole message may come first.
            let first = incoming.advance(&mut source, claims.then_some(&mut waiting));
            assert!(first.is_err() || incoming.advance(&mut source, None).is_err());
        }
    };
    refused(|source| source.next(1));
    refused(|source| {
        source.first(1, 10, 10);
        source.next(1);
    });
    refused(|source| source.fragments.push_back([77; 8]));
    let (mut incoming, mut source) = (Incoming::default(), Scripted::default());
    source.first(1, 10, 4);
    source.next(7);
    let mut out = [0; 10];
    assert!(incoming.advance(&mut source, Some(&mut post(1, &mut out))).is_err(), "too long");
    assert_eq!(out[4..], [0; 6]);
}
