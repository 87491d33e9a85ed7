//! One client of the server: bytes in, the table asked, bytes out. Knows no socket.

use std::collections::VecDeque;

use super::limits::{ANSWER_LEN, OVERHEAD, Refusal, at_most};
use super::table::{Table, Value, Waiter};
use super::wire::{Decoder, MAGIC, NOT_READY, Query, READY, STOP_WAITING, WAIT_CANCELED, put_len};

/// While this much output lies unsent, no further query of the client is answered.
const OUTPUT_PAUSE: usize = 256 << 10;

/// Values from this length on are sent from where they lie.
const SHARED: usize = 4 << 10;

pub(super) struct Session {
    /// The client's name in the table.
    id: Waiter,
    decoder: Decoder,
    validated: bool,
    output: Output,
    /// What the table keeps for the client's wait.
    wait_cost: usize,
}

/// What is to be sent, in order. Large values are shared with the table, so that a client that asks for much and reads
/// nothing costs no more than one that asks for little.
#[derive(Default)]
struct Output {
    pieces: VecDeque<Piece>,
    /// How much of the first piece has been sent.
    sent: usize,
    /// The bytes of all pieces that are unsent, and of those that nobody else has.
    unsent: usize,
    own: usize,
}

enum Piece {
    Own(Vec<u8>),
    Shared(Value),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(value) => value.bytes(),
        }
    }
}

impl Output {
    fn put(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return; // an empty piece would look like the end of the output
        }
        self.unsent += bytes.len();
        self.own += bytes.len();
        match self.pieces.back_mut() {
            Some(Piece::Own(last)) if last.len() < OUTPUT_PAUSE => last.extend_from_slice(bytes),
            _ => self.pieces.push_back(Piece::Own(bytes.to_vec())),
        }
    }

    /// A length and that many bytes; none for a key that does not exist.
    fn put_value(&mut self, value: Option<Value>) {
        let len = value.as_ref().map_or(0, |value| value.bytes().len());
        let mut prefix = Vec::with_capacity(size_of::<u64>());
        put_len(&mut prefix, len);
        self.put(&prefix);
        match value {
            Some(value) if len >= SHARED => {
                self.unsent += len;
                self.pieces.push_back(Piece::Shared(value));
            }
            Some(value) => self.put(value.bytes()),
            None => {}
        }
    }

    fn next(&self) -> &[u8] {
        let first = self.pieces.front().map(Piece::bytes).unwrap_or_default();
        first.get(self.sent..).unwrap_or_default()
    }

    fn mark_sent(&mut self, len: usize) {
        self.sent += len;
        self.unsent = self.unsent.saturating_sub(len);
        while self.pieces.front().is_some_and(|piece| self.sent >= piece.bytes().len()) {
            if let Some(Piece::Own(bytes)) = self.pieces.pop_front() {
                self.own -= bytes.len();
            }
            self.sent = 0;
        }
        if self.pieces.is_empty() {
            self.pieces.shrink_to(4);
        }
    }
}

impl Session {
    pub(super) fn new(id: Waiter) -> Self {
        let (decoder, output) = (Decoder::default(), Output::default());
        Self { id, decoder, validated: false, output, wait_cost: 0 }
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.decoder.feed(bytes);
    }

    /// Answers what has been fed; `false` if it paused because too much output lies unsent.
    pub(super) fn answer(&mut self, table: &mut Table) -> Result<bool, Refusal> {
        while !self.is_paused() {
            let Some(query) = self.decoder.next()? else { return Ok(true) };
            self.carry_out(query, table)?;
            // A client that ends its own wait hears of it before the answer to its next query.
            if table.take_woken_one(self.id) {
                self.stop_waiting();
            }
        }
        Ok(false)
    }

    /// Whether the client has to read before it is heard again.
    pub(super) fn is_paused(&self) -> bool {
        self.output.unsent >= OUTPUT_PAUSE
    }

    /// Whether it has shown that it is a client at all.
    pub(super) fn is_validated(&self) -> bool {
        self.validated
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.wait_cost > 0
    }

    pub(super) fn stop_waiting(&mut self) {
        self.wait_cost = 0;
        self.output.put(&[STOP_WAITING]);
    }

    /// The next bytes to send; not all, if there are many.
    pub(super) fn unsent(&self) -> &[u8] {
        self.output.next()
    }

    pub(super) fn mark_sent(&mut self, len: usize) {
        self.output.mark_sent(len);
    }

    /// What the client costs, apart from values that the table has too.
    pub(super) fn cost(&self) -> usize {
        let output = self.output.own + self.output.pieces.len() * OVERHEAD;
        self.decoder.held() + output + self.wait_cost
    }

    /// How much it keeps of values that the table may have no more.
    pub(super) fn shared(&self) -> usize {
        self.output.unsent.saturating_sub(self.output.own)
    }

    fn carry_out(&mut self, query: Query, table: &mut Table) -> Result<(), Refusal> {
        if !self.validated {
            return self.validate(&query);
        }
        let out = &mut self.output;
        match query {
            // PyTorch's own clients validate once; a second time does no harm.
            Query::Validate(_) => return self.validate(&query),
            Query::Set { key, value } => table.set(key, value)?,
            Query::CompareSet { key, expected, new } => {
                out.put_value(Some(table.compare_set(key, expected, new)?));
            }
            // An absent key reads as empty, as from torch's libuv server: clients wait for it first.
            Query::Get(key) => out.put_value(table.value(&key)),
            Query::Add { key, amount } => {
                out.put(&table.add(key, amount)?.to_ne_bytes());
            }
            Query::Check(keys) => {
                out.put(&[if table.contains_all(&keys) { READY } else { NOT_READY }]);
            }
            Query::Wait(keys) => return self.wait(&keys, table),
            Query::NumKeys => out.put(&(table.len() as u64).to_ne_bytes()),
            Query::Delete(key) => {
                out.put(&i64::from(table.delete(&key)).to_ne_bytes());
            }
            Query::Append { key, value } => table.append(key, &value)?,
            Query::MultiGet(keys) => return self.multi_get(&keys, table),
            Query::MultiSet(entries) => {
                entries.into_iter().try_for_each(|(key, value)| table.set(key, value))?;
            }
            Query::CancelWait => {
                table.cancel(self.id);
                self.wait_cost = 0;
                out.put(&[WAIT_CANCELED]);
            }
            Query::Ping(word) => out.put(&word.to_ne_bytes()),
        }
        Ok(())
    }

    fn validate(&mut self, query: &Query) -> Result<(), Refusal> {
        self.validated = *query == Query::Validate(MAGIC);
        if self.validated {
            return Ok(());
        }
        let got = match query {
            Query::Validate(word) => format!("{word:#x}"),
            _ => "another query".to_owned(),
        };
        Err(Refusal::new(format!("a first query with the word {MAGIC:#x}"), got))
    }

    fn wait(&mut self, keys: &[Vec<u8>], table: &mut Table) -> Result<(), Refusal> {
        if table.is_waiting(self.id) {
            return Err(Refusal::new("one wait at a time", "a second one"));
        }
        if table.wait(self.id, keys) {
            self.stop_waiting();
        } else {
            // Each is kept twice, in a set each time.
            self.wait_cost = keys.iter().map(|key| 2 * (key.len() + OVERHEAD)).sum();
        }
        Ok(())
    }

    fn multi_get(&mut self, keys: &[Vec<u8>], table: &Table) -> Result<(), Refusal> {
        let values = || keys.iter().map(|key| table.get(key).unwrap_or_default());
        let len: usize = values().map(|value| value.len() + size_of::<u64>()).sum();
        at_most(ANSWER_LEN, len as u64, "an answer length")?;
        keys.iter().for_each(|key| self.output.put_value(table.value(key)));
        Ok(())
    }
}

/// What the fuzzer calls. Lives here because everything it drives is private.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing {
    use super::{Session, Table};

    /// Lets a client send `input`, whole and cut into pieces, and checks that both mean the same.
    #[allow(clippy::panic, reason = "a panic is how a fuzzer learns of a finding")]
    pub fn serve(cut: usize, input: &[u8]) {
        let whole = outcome(&[input]);
        let pieces: Vec<&[u8]> = input.chunks(cut.max(1)).collect();
        if outcome(&pieces) != whole {
            panic!("the meaning depends on how the bytes are cut");
        }
    }

    fn outcome(pieces: &[&[u8]]) -> (Vec<u8>, usize, bool) {
        let mut table = Table::default();
        let (mut client, mut bystander) = (Session::new(1), Session::new(2));
        bystander.validated = true;
        table.wait(2, &["/a"]);
        let (mut output, mut fine) = (Vec::new(), true);
        'input: for piece in pieces {
            client.feed(piece);
            loop {
                let verdict = client.answer(&mut table);
                for woken in table.take_woken() {
                    if woken == 1 { client.stop_waiting() } else { bystander.stop_waiting() }
                }
                drain(&mut client, &mut output);
                match verdict {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(_) => {
                        fine = false;
                        break 'input;
                    }
                }
            }
        }
        table.cancel(1);
        drain(&mut bystander, &mut output);
        (output, table.len(), fine)
    }

    fn drain(session: &mut Session, output: &mut Vec<u8>) {
        while !session.unsent().is_empty() {
            output.extend_from_slice(session.unsent());
            session.mark_sent(session.unsent().len());
        }
    }
}
