//! One client of the server: bytes in, the table asked, bytes out. Knows no socket.

use super::limits::{MESSAGE_LEN, Refusal, at_most};
use super::table::{Table, Waiter};
use super::wire::{
    Decoder, MAGIC, NOT_READY, Query, READY, STOP_WAITING, WAIT_CANCELED, put_value,
};

/// While this much output lies unsent, no further query of the client is answered. One answer is at most
/// `MESSAGE_LEN`, so the two together bound what a client that does not read can cost.
const OUTPUT_PAUSE: usize = 256 << 10;

pub(super) struct Session {
    /// The client's name in the table.
    id: Waiter,
    decoder: Decoder,
    validated: bool,
    output: Vec<u8>,
    /// How much of `output` has been sent.
    sent: usize,
}

impl Session {
    pub(super) fn new(id: Waiter) -> Self {
        Self { id, decoder: Decoder::default(), validated: false, output: vec![], sent: 0 }
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
        self.unsent().len() >= OUTPUT_PAUSE
    }

    pub(super) fn stop_waiting(&mut self) {
        self.output.push(STOP_WAITING);
    }

    pub(super) fn unsent(&self) -> &[u8] {
        self.output.get(self.sent..).unwrap_or_default()
    }

    pub(super) fn mark_sent(&mut self, len: usize) {
        self.sent += len;
        if self.unsent().is_empty() {
            self.output.clear();
            self.output.shrink_to(OUTPUT_PAUSE);
            self.sent = 0;
        }
    }

    fn carry_out(&mut self, query: Query, table: &mut Table) -> Result<(), Refusal> {
        if !self.validated {
            return self.validate(&query);
        }
        let out = &mut self.output;
        match query {
            // PyTorch's own clients validate once; a second time does no harm.
            Query::Validate(_) => return self.validate(&query),
            Query::Set { key, value } => table.set(key, value),
            Query::CompareSet { key, expected, new } => {
                put_value(out, &table.compare_set(key, expected, new));
            }
            // An absent key reads as empty, as from torch's libuv server: clients wait for it first.
            Query::Get(key) => put_value(out, table.get(&key).unwrap_or_default()),
            Query::Add { key, amount } => {
                out.extend_from_slice(&table.add(key, amount)?.to_ne_bytes());
            }
            Query::Check(keys) => {
                out.push(if table.contains_all(&keys) { READY } else { NOT_READY });
            }
            Query::Wait(keys) => return self.wait(&keys, table),
            Query::NumKeys => out.extend_from_slice(&(table.len() as u64).to_ne_bytes()),
            Query::Delete(key) => {
                out.extend_from_slice(&i64::from(table.delete(&key)).to_ne_bytes());
            }
            Query::Append { key, value } => table.append(key, &value)?,
            Query::MultiGet(keys) => return self.multi_get(&keys, table),
            Query::MultiSet(entries) => {
                entries.into_iter().for_each(|(key, value)| table.set(key, value));
            }
            Query::CancelWait => {
                table.cancel(self.id);
                out.push(WAIT_CANCELED);
            }
            Query::Ping(word) => out.extend_from_slice(&word.to_ne_bytes()),
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
        }
        Ok(())
    }

    fn multi_get(&mut self, keys: &[Vec<u8>], table: &Table) -> Result<(), Refusal> {
        let values = || keys.iter().map(|key| table.get(key).unwrap_or_default());
        let len: usize = values().map(|value| value.len() + size_of::<u64>()).sum();
        at_most(MESSAGE_LEN, len as u64, "an answer length")?;
        values().for_each(|value| put_value(&mut self.output, value));
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
                output.extend_from_slice(client.unsent());
                client.mark_sent(client.unsent().len());
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
        output.extend_from_slice(bystander.unsent());
        (output, table.len(), fine)
    }
}
