//! Messages to groups over a connection.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::net::{TcpListener, TcpStream};

use super::super::landing::{Landing, trial};
use super::super::secret::Bond;
use super::tests::{pair, soon};
use super::*;
use crate::error::Error;
use crate::memory::region::Region;

const GROUP: u128 = 7;

/// A group that takes long messages elsewhere, if they begin so.
#[derive(Default)]
struct Group {
    delivered: RefCell<Vec<Vec<u8>>>,
    /// What has come of a message before its rest landed, and where that is.
    landed: RefCell<Vec<(Vec<u8>, Region)>>,
    lands: Cell<bool>,
    lends: Cell<bool>,
}

impl GroupMessages for Group {
    fn deliver(&self, group: u128, bytes: &[u8]) -> Result<(), String> {
        assert_eq!(group, GROUP);
        self.delivered.borrow_mut().push(bytes.to_vec());
        Ok(())
    }

    fn land(&self, group: u128, beginning: &[u8], rest: usize) -> Option<Landing> {
        assert_eq!(group, GROUP);
        let (place, memory) = if self.lends.get() { trial::lent(rest) } else { trial::place(rest) };
        let lands = self.lands.get() && beginning.first() == Some(&1);
        lands.then(|| self.landed.borrow_mut().push((beginning.to_vec(), memory)));
        lands.then_some(place)
    }
}

impl Group {
    fn that_lands() -> Self {
        Self { lands: Cell::new(true), ..Self::default() }
    }

    fn landed(&self) -> Vec<Vec<u8>> {
        let landed = self.landed.borrow();
        landed.iter().map(|(begun, rest)| [&begun[..], &trial::read(rest)].concat()).collect()
    }
}

/// A message of so many bytes, the first of which is given.
fn bytes(first: u8, len: usize) -> Vec<u8> {
    std::iter::once(first).chain((1..len).map(|i| (i * 7 + i / 251) as u8)).collect()
}

/// A connection at whose other end are bare bytes.
fn bare() -> (TcpStream, Stream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    one.set_nodelay(true).unwrap();
    let stream = Stream::new(listener.accept().unwrap().0.into()).unwrap();
    stream.trust();
    (one, stream)
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    assert!(frames::append(&mut all, &[&head(GROUP), message]));
    all
}

/// Receives until `done`.
fn receive_until(stream: &Stream, group: &Group, done: impl Fn() -> bool) {
    while !done() {
        let came = stream.receive_and(group);
        assert!(matches!(came, Received::Nothing));
    }
}

#[test]
fn a_message_that_lands_elsewhere_is_whole_however_it_comes() {
    let messages = [bytes(1, 60_000), bytes(1, 50_000), bytes(0, 40_000), bytes(1, 100)];
    let all: Vec<u8> = messages.iter().flat_map(|message| framed(message)).collect();
    for piece in [700, 7_001, 60_000, all.len()] {
        let ((mut sender, stream), group) = (bare(), Group::that_lands());
        for bytes in all.chunks(piece) {
            sender.write_all(bytes).unwrap();
            let came = stream.receive_and(&group);
            assert!(matches!(came, Received::Nothing));
        }
        receive_until(&stream, &group, || group.delivered.borrow().last() == Some(&messages[3]));
        // What had come whole at once was delivered as it was.
        let (landed, delivered) = (group.landed(), group.delivered.borrow());
        assert!(piece > 10_000 || !landed.is_empty(), "{piece}");
        assert!(landed.iter().all(|message| messages[..2].contains(message)), "{piece}");
        assert_eq!(landed.len() + delivered.len(), messages.len(), "{piece}");
        assert_eq!(delivered[delivered.len() - 2..], messages[2..], "{piece}");
        let counted: u64 = messages.iter().map(|message| cost_of(message.len())).sum();
        assert_eq!(stream.taken.load(Ordering::Relaxed), counted, "{piece}");
    }
}

#[test]
fn of_a_message_whose_sender_dies_only_what_has_come_lands() {
    let ((mut sender, stream), group) = (bare(), Group::that_lands());
    let (message, sent) = (bytes(1, 60_000), 30_000);
    let frame = framed(&message);
    sender.write_all(&frame[..1000]).unwrap();
    receive_until(&stream, &group, || !group.landed.borrow().is_empty());
    sender.write_all(&frame[1000..sent]).unwrap();
    drop(sender);
    let ended = loop {
        match stream.receive_and(&group) {
            Received::Nothing => std::thread::yield_now(),
            other => break other,
        }
    };
    assert!(matches!(ended, Received::End));
    let (landed, came) = (group.landed(), sent - (frame.len() - message.len()));
    assert_eq!(landed[0][..came], message[..came]);
    assert!(landed[0][came..].iter().all(|byte| *byte == 0));
    assert!(group.delivered.borrow().is_empty());
}

/// The memory outlives whoever gave it.
#[test]
fn a_place_is_kept_until_its_bytes_have_come() {
    let ((mut sender, stream), group) = (bare(), Group::that_lands());
    let frame = framed(&bytes(1, 60_000));
    sender.write_all(&frame[..1000]).unwrap();
    receive_until(&stream, &group, || !group.landed.borrow().is_empty());
    drop(group);
    let next = Group::default();
    sender.write_all(&[&frame[1000..], &framed(&[2])].concat()).unwrap();
    receive_until(&stream, &next, || next.delivered.borrow().last() == Some(&vec![2]));
    assert_eq!(next.delivered.borrow().len(), 1);
}

#[test]
fn what_was_lent_gets_no_more_bytes_once_the_loan_has_ended() {
    for lends in [true, false] {
        let ((mut sender, stream), group) = (bare(), Group::that_lands());
        group.lends.set(lends);
        let (message, sent) = (bytes(1, 60_000), 30_000);
        let frame = framed(&message);
        let came = sent - (frame.len() - message.len());
        sender.write_all(&frame[..1000]).unwrap();
        receive_until(&stream, &group, || !group.landed.borrow().is_empty());
        sender.write_all(&frame[1000..sent]).unwrap();
        receive_until(&stream, &group, || group.landed()[0][came - 1] == message[came - 1]);
        (0..2).for_each(|_| stream.end_loan());
        sender.write_all(&[&frame[sent..], &framed(&[2])].concat()).unwrap();
        receive_until(&stream, &group, || group.delivered.borrow().last() == Some(&vec![2]));
        let landed = group.landed();
        assert_eq!(landed[0][..came], message[..came]);
        match lends {
            true => assert!(landed[0][came..].iter().all(|byte| *byte == 0)),
            false => assert_eq!(landed[0], message, "that is kept for it"),
        }
        let counted = cost_of(message.len()) + cost_of(1);
        assert_eq!(stream.taken.load(Ordering::Relaxed), counted);
    }
}

#[test]
fn nothing_lands_before_the_other_end_is_trusted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let stream = Stream::new(listener.accept().unwrap().0.into()).unwrap();
    let group = Group::that_lands();
    stranger.write_all(&framed(&bytes(1, 60_000))[..1000]).unwrap();
    let refused = loop {
        match stream.receive_and(&group) {
            Received::Nothing => std::thread::yield_now(),
            other => break other,
        }
    };
    assert!(matches!(refused, Received::Garbage(_)));
    assert!(group.landed.borrow().is_empty() && group.delivered.borrow().is_empty());
}

#[test]
fn messages_sent_together_come_in_order_also_where_there_is_no_room_for_all() {
    let ((one, two), group) = (pair(), Group::that_lands());
    let all: Vec<Vec<u8>> =
        (0..60).map(|i| bytes(2 + i, if i % 3 == 0 { 9 } else { 60_000 })).collect();
    let parts: Vec<[&[u8]; 2]> = all.iter().map(|message| message.split_at(5).into()).collect();
    one.post(GROUP, &parts, false);
    assert!(!one.outbound().later.is_empty(), "more than a window");
    one.post(GROUP, &[[&[1; 10], &[]]], false);
    let is_over = || group.delivered.borrow().last() == Some(&vec![1; 10]);
    while !is_over() {
        assert!(matches!(two.receive_and(&group), Received::Nothing));
        assert!(matches!(one.receive(), Received::Nothing));
    }
    assert_eq!(group.delivered.borrow()[..60], all);
}

#[test]
fn a_sender_of_more_than_a_window_gives_up_at_its_deadline() {
    let ((one, two), group) = (pair(), Group::default());
    let message = bytes(3, 60_000);
    let parts: Vec<[&[u8]; 2]> = (0..60).map(|_| [&message[..9], &message[9..]]).collect();
    let late = one.send_to_group(GROUP, &parts, soon(), &|| {}).unwrap_err();
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    let sent = one.outbound().sent / cost_of(message.len());
    assert!(sent > 1 && sent < 60);
    receive_until(&two, &group, || group.delivered.borrow().len() as u64 == sent);
    assert!(group.delivered.borrow().iter().all(|came| *came == message));
    // Those that did not go are not sent later.
    one.send_to_group(GROUP, &[[&[4], &[]]], soon(), &|| drop(one.receive())).unwrap();
    one.send_held();
    receive_until(&two, &group, || group.delivered.borrow().last() == Some(&vec![4]));
    assert_eq!(group.delivered.borrow().len() as u64, sent + 1);
}

#[test]
fn what_is_sent_takes_acknowledgements_along() {
    let ((one, two), group) = (pair(), Group::default());
    let message = bytes(3, 60_000);
    let quarter = WINDOW / 4 / cost_of(message.len()) + 1;
    for _ in 0..quarter {
        one.post(GROUP, &[[&message, &[]]], false);
    }
    receive_until(&two, &group, || group.delivered.borrow().len() as u64 == quarter);
    assert_eq!(two.told.load(Ordering::Relaxed), 0, "not worth a message of its own");
    two.post(GROUP, &[[&[1], &[]]], false);
    receive_until(&one, &group, || group.delivered.borrow().last() == Some(&vec![1]));
    assert_eq!(one.outbound().taken, quarter * cost_of(message.len()));
}

/// What is encrypted has to be decrypted first.
#[test]
fn nothing_lands_of_an_encrypted_connection() {
    let ((one, two), group) = (pair(), Group::that_lands());
    let bond = Bond { key: &[7; 32], token: 5, from: 0, to: 1 };
    let (proof, call) = bond.call().unwrap();
    let (theirs, answer) = Bond { key: &[7; 32], token: 5, from: 0, to: 1 }.answer(&call).unwrap();
    one.seal_with(proof.finish(&answer).unwrap());
    two.seal_with(theirs);
    let messages = [bytes(1, 60_000), bytes(1, 60_000), bytes(1, 10)];
    let parts = messages.each_ref().map(|message| <[&[u8]; 2]>::from(message.split_at(9)));
    one.post(GROUP, &parts, false);
    receive_until(&two, &group, || group.delivered.borrow().len() == messages.len());
    assert!(*group.delivered.borrow() == messages && group.landed.borrow().is_empty());
}
