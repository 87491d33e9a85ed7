//! The ring that carries messages from one rank to another.

use std::sync::Arc;

use symmem::model::{Reader, RingMemory, Writer};

use super::model::*;

const LINES: u32 = 4;

/// Its headers are words; the data of each line is one value, which loom watches.
struct Ring {
    headers: Vec<[ModelWord; 8]>,
    taken: ModelWord,
    withdrawn: ModelWord,
    data: Data,
}

impl Ring {
    fn new() -> Arc<Self> {
        let header = |_| std::array::from_fn(|_| ModelWord::new());
        let [taken, withdrawn] = [(); 2].map(|()| ModelWord::new());
        let (headers, data) = ((0..LINES).map(header).collect(), Data::new(LINES as usize));
        Arc::new(Self { headers, taken, withdrawn, data })
    }

    /// The lines over which so many bytes behind a header extend.
    fn under(line: u32, bytes: usize) -> impl Iterator<Item = usize> {
        (0..(32 + bytes).div_ceil(64)).map(move |i| ((line + i as u32) % LINES) as usize)
    }
}

#[derive(Clone)]
struct Memory(Arc<Ring>);

impl RingMemory for Memory {
    type Word = ModelWord;

    fn lines(&self) -> u32 {
        LINES
    }

    fn taken(&self) -> &ModelWord {
        &self.0.taken
    }

    fn withdrawn(&self) -> &ModelWord {
        &self.0.withdrawn
    }

    fn header(&self, line: u32, word: usize) -> &ModelWord {
        &self.0.headers[(line % LINES) as usize][word]
    }

    fn write(&self, line: u32, data: &[u8]) {
        Ring::under(line, data.len()).for_each(|at| self.0.data.write(at, data[0].into()));
    }

    fn read(&self, line: u32, out: &mut [u8]) {
        let mut values = Ring::under(line, out.len()).map(|at| self.0.data.read(at));
        let first = values.next().unwrap();
        assert!(values.all(|value| value == first), "parts of different messages");
        out.fill(first as u8);
    }
}

/// Sends messages of these lengths and values, as soon as there is room.
fn send(rank: &Rank, ring: &Arc<Ring>, messages: &[(usize, u8)]) {
    let mut writer = Writer::new(Memory(Arc::clone(ring)));
    for &(len, value) in messages {
        assert_eq!(rank.signals.wait_for(1, NEVER, || writer.has_room(len), || false), Ok(()));
        let mut header = [0; 8];
        (header[0], header[1]) = (1, len as u32);
        writer.push(&header, &vec![value; len]);
        rank.signals.wake(1);
    }
}

fn receive(rank: &Rank, ring: &Arc<Ring>, messages: &[(usize, u8)]) {
    let mut reader = Reader::new(Memory(Arc::clone(ring)));
    for &(len, value) in messages {
        assert_eq!(rank.signals.wait_for(0, NEVER, || reader.front().is_some(), || false), Ok(()));
        let header = reader.front().unwrap();
        assert_eq!((header[0], header[1]), (1, len as u32));
        let mut out = vec![0; len];
        reader.read(&mut out);
        assert!(out.iter().all(|byte| *byte == value));
        reader.pop(len);
        rank.signals.wake(0);
    }
}

fn explore(model: Model, messages: &'static [(usize, u8)]) -> bool {
    model.explore_threads(move |group| {
        let ring = Ring::new();
        let [zero, one] = <[Arc<Rank>; 2]>::try_from(group).ok().unwrap();
        let to = Arc::clone(&ring);
        let sender = Box::new(move || send(&zero, &to, messages)) as Thread;
        vec![sender, Box::new(move || receive(&one, &ring, messages))]
    })
}

#[test]
fn messages_arrive_whole_and_are_overwritten_only_once_they_were_read() {
    // The third begins where the first was, so its sender waits, and sleeps.
    assert!(explore(Model { preemptions: 2, ..TWO }, &[(4, 1), (100, 2), (4, 3), (4, 4)]));
}

#[test]
fn a_ring_goes_on_when_each_message_fills_it() {
    assert!(explore(Model { preemptions: 2, ..TWO }, &[(160, 1), (160, 2), (160, 3)]));
}

#[test]
fn whoever_sees_that_a_message_was_withdrawn_sees_all_that_came_of_it() {
    Model { preemptions: 3, ..TWO }.explore_threads(move |_| {
        let ring = Ring::new();
        let to = Arc::clone(&ring);
        let sender = move || {
            let mut writer = Writer::new(Memory(to));
            assert!(writer.has_room(4));
            writer.push(&[1, 4, 0, 0, 0, 0, 0, 0], &[7; 4]);
            writer.withdraw(1);
        };
        let receiver = move || {
            let reader = Reader::new(Memory(ring));
            let is_withdrawn = reader.withdrawn() == 1;
            assert!(!is_withdrawn || reader.front().is_some());
        };
        vec![Box::new(sender) as Thread, Box::new(receiver)]
    });
}
