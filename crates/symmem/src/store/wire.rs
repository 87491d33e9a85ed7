//! PyTorch's TCPStore wire format: queries, answers, and a decoder that believes no length.
//!
//! A query is one byte of kind and its fields; numbers are native-endian, keys and values are
//! a 64-bit length and bytes. The first query of a connection is `Validate`.
//!
//! | query | answer |
//! |---|---|
//! | `Validate`, `Set`, `Append`, `MultiSet` | none |
//! | `Get`, `CompareSet`; `MultiGet` | a value; one after the other |
//! | `Add`, `NumKeys`; `Delete` | i64; how many were deleted |
//! | `Check` | `READY` or `NOT_READY` |
//! | `Wait`; `CancelWait` | `STOP_WAITING` once all keys exist; `WAIT_CANCELED` |
//! | `Ping` | the same word |

use super::limits::{
    MAX_KEYS, MAX_VALUE_LEN, MESSAGE_LEN, OVERHEAD, Refusal, WIRE_KEY_LEN, at_most,
};

/// What `Validate` carries.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;

/// Answers to `Check`.
pub(super) const READY: u8 = 0;
pub(super) const NOT_READY: u8 = 1;

/// Answers to `Wait` and `CancelWait`.
pub(super) const STOP_WAITING: u8 = 0;
pub(super) const WAIT_CANCELED: u8 = 1;

/// Values from this length on are not copied.
const LARGE: usize = 64 << 10;

/// The kinds of query; each one's number is its first byte. PyTorch's later ones are not spoken here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Validate,
    Set,
    CompareSet,
    Get,
    Add,
    Check,
    Wait,
    NumKeys,
    Delete,
    Append,
    MultiGet,
    MultiSet,
    CancelWait,
    Ping,
}

#[derive(Clone, Copy)]
enum Field {
    Key,
    Value,
    Amount,
    Word,
}

impl Kind {
    const ALL: [Self; 14] = [
        Self::Validate,
        Self::Set,
        Self::CompareSet,
        Self::Get,
        Self::Add,
        Self::Check,
        Self::Wait,
        Self::NumKeys,
        Self::Delete,
        Self::Append,
        Self::MultiGet,
        Self::MultiSet,
        Self::CancelWait,
        Self::Ping,
    ];

    fn fields(self) -> &'static [Field] {
        match self {
            Self::Validate | Self::Ping => &[Field::Word],
            Self::Set | Self::Append | Self::MultiSet => &[Field::Key, Field::Value],
            Self::CompareSet => &[Field::Key, Field::Value, Field::Value],
            Self::Get | Self::Delete | Self::Check | Self::Wait | Self::MultiGet => &[Field::Key],
            Self::Add => &[Field::Key, Field::Amount],
            Self::NumKeys | Self::CancelWait => &[],
        }
    }

    /// Whether a count comes first, and the fields that many times.
    fn is_counted(self) -> bool {
        matches!(self, Self::Check | Self::Wait | Self::MultiGet | Self::MultiSet)
    }
}

/// A query as the server sees it. Keys are bytes: a torch client may use any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Query {
    Validate(u32),
    Set { key: Vec<u8>, value: Vec<u8> },
    CompareSet { key: Vec<u8>, expected: Vec<u8>, new: Vec<u8> },
    Get(Vec<u8>),
    Add { key: Vec<u8>, amount: i64 },
    Check(Vec<Vec<u8>>),
    Wait(Vec<Vec<u8>>),
    NumKeys,
    Delete(Vec<u8>),
    Append { key: Vec<u8>, value: Vec<u8> },
    MultiGet(Vec<Vec<u8>>),
    MultiSet(Vec<(Vec<u8>, Vec<u8>)>),
    CancelWait,
    Ping(u32),
}

/// Queries to send, one behind the other.
#[derive(Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    pub(super) fn new(kind: Kind) -> Self {
        Self::default().then(kind)
    }

    pub(super) fn then(mut self, kind: Kind) -> Self {
        self.0.push(kind as u8);
        self
    }

    /// A key with the slash that torch's clients put before theirs.
    pub(super) fn key(mut self, key: &str) -> Self {
        put_len(&mut self.0, key.len() + 1);
        self.0.push(b'/');
        self.0.extend_from_slice(key.as_bytes());
        self
    }

    pub(super) fn keys(self, keys: &[&str]) -> Self {
        keys.iter().fold(self.count(keys.len()), |message, key| message.key(key))
    }

    pub(super) fn value(mut self, value: &[u8]) -> Self {
        put_value(&mut self.0, value);
        self
    }

    pub(super) fn count(mut self, count: usize) -> Self {
        put_len(&mut self.0, count);
        self
    }

    pub(super) fn amount(mut self, amount: i64) -> Self {
        self.0.extend_from_slice(&amount.to_ne_bytes());
        self
    }

    pub(super) fn word(mut self, word: u32) -> Self {
        self.0.extend_from_slice(&word.to_ne_bytes());
        self
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

pub(super) fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&(len as u64).to_ne_bytes());
}

pub(super) fn put_value(out: &mut Vec<u8>, value: &[u8]) {
    put_len(out, value.len());
    out.extend_from_slice(value);
}

/// Turns the bytes of one connection into queries, however they are cut into pieces.
///
/// Work and memory are in proportion to the bytes fed. After a refusal the connection has no meaning.
#[derive(Default)]
pub(super) struct Decoder {
    input: Vec<u8>,
    /// How much of `input` has been used.
    used: usize,
    partial: Option<Partial>,
}

/// A query whose end has not come yet.
struct Partial {
    kind: Kind,
    /// Fields still to come; unknown until a counted query has told its count.
    left: Option<usize>,
    read: usize,
    size: usize,
    keys: Vec<Vec<u8>>,
    values: Vec<Vec<u8>>,
    amount: i64,
    word: u32,
}

impl Decoder {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        // What moves is less than one field, and moves once: `used` is 0 until that field is complete.
        self.input.drain(..self.used);
        self.used = 0;
        self.input.extend_from_slice(bytes);
    }

    /// The next complete query, or `None` until more is fed.
    pub(super) fn next(&mut self) -> Result<Option<Query>, Refusal> {
        loop {
            let mut partial = match self.partial.take() {
                Some(partial) => partial,
                None => match self.take::<1>() {
                    Some([byte]) => Partial::new(byte)?,
                    None => return Ok(None),
                },
            };
            if partial.left == Some(0) {
                self.give_back_memory();
                return Ok(Some(partial.finish()));
            }
            let advanced = self.advance(&mut partial)?;
            self.partial = Some(partial);
            if !advanced {
                return Ok(None);
            }
        }
    }

    /// Reads the count or one field; `false` if it is not there yet.
    fn advance(&mut self, partial: &mut Partial) -> Result<bool, Refusal> {
        let fields = partial.kind.fields();
        let Some(left) = partial.left else {
            let Some(count) = self.take() else { return Ok(false) };
            let count = at_most(MAX_KEYS, u64::from_ne_bytes(count), "a number of keys")?;
            partial.left = Some(count * fields.len());
            return Ok(true);
        };
        let complete = match fields.get(partial.read % fields.len().max(1)) {
            Some(Field::Key) => {
                let key = self.take_sized(WIRE_KEY_LEN, "a key length", &mut partial.size)?;
                key.map(|key| partial.keys.push(key)).is_some()
            }
            Some(Field::Value) => {
                let value = self.take_sized(MAX_VALUE_LEN, "a value length", &mut partial.size)?;
                value.map(|value| partial.values.push(value)).is_some()
            }
            Some(Field::Amount) => {
                self.take().map(|bytes| partial.amount = i64::from_ne_bytes(bytes)).is_some()
            }
            Some(Field::Word) => {
                self.take().map(|bytes| partial.word = u32::from_ne_bytes(bytes)).is_some()
            }
            None => true,
        };
        if complete {
            partial.left = Some(left.saturating_sub(1));
            partial.read += 1;
        }
        Ok(complete)
    }

    fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        self.input.get(self.used..)?.first_chunk().copied()
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.peek()?;
        self.used += N;
        Some(bytes)
    }

    /// A length and that many bytes. The length is judged as soon as it is there.
    fn take_sized(
        &mut self,
        most: usize,
        what: &str,
        size: &mut usize,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        let Some(len) = self.peek() else { return Ok(None) };
        let len = at_most(most, u64::from_ne_bytes(len), what)?;
        at_most(MESSAGE_LEN, (*size + len) as u64, "a query length")?;
        let start = self.used + size_of::<u64>();
        let end = start + len;
        if self.input.len() < end {
            return Ok(None);
        }
        *size += len;
        if len < LARGE {
            self.used = end;
            return Ok(Some(self.input.get(start..end).unwrap_or_default().to_vec()));
        }
        // In place: there is no need to have it twice.
        let rest = self.input.split_off(end);
        let mut bytes = std::mem::replace(&mut self.input, rest);
        bytes.drain(..start);
        self.used = 0;
        Ok(Some(bytes))
    }

    /// What is kept here for a query that is not complete.
    pub(super) fn held(&self) -> usize {
        let fields = |p: &Partial| p.size + (p.keys.len() + p.values.len()) * OVERHEAD;
        self.input.len() + self.partial.as_ref().map_or(0, fields)
    }

    /// One large value must not keep its memory for as long as the connection lives.
    fn give_back_memory(&mut self) {
        if self.used == self.input.len() && self.input.capacity() > LARGE {
            self.input = Vec::new();
            self.used = 0;
        }
    }
}

impl Partial {
    fn new(byte: u8) -> Result<Self, Refusal> {
        let Some(&kind) = Kind::ALL.get(usize::from(byte)) else {
            return Err(Refusal::new("a query of kind 0 to 13", format!("kind {byte}")));
        };
        let left = (!kind.is_counted()).then_some(kind.fields().len());
        let (keys, values) = (Vec::new(), Vec::new());
        Ok(Self { kind, left, read: 0, size: 0, keys, values, amount: 0, word: 0 })
    }

    /// The query, once all its fields are there; `next` sees to that.
    fn finish(self) -> Query {
        let (mut keys, mut values) = (self.keys.into_iter(), self.values.into_iter());
        let mut key = || keys.next().unwrap_or_default();
        let mut value = || values.next().unwrap_or_default();
        match self.kind {
            Kind::Validate => Query::Validate(self.word),
            Kind::Set => Query::Set { key: key(), value: value() },
            Kind::CompareSet => Query::CompareSet { key: key(), expected: value(), new: value() },
            Kind::Get => Query::Get(key()),
            Kind::Add => Query::Add { key: key(), amount: self.amount },
            Kind::Check => Query::Check(keys.collect()),
            Kind::Wait => Query::Wait(keys.collect()),
            Kind::NumKeys => Query::NumKeys,
            Kind::Delete => Query::Delete(key()),
            Kind::Append => Query::Append { key: key(), value: value() },
            Kind::MultiGet => Query::MultiGet(keys.collect()),
            Kind::MultiSet => Query::MultiSet(keys.zip(values).collect()),
            Kind::CancelWait => Query::CancelWait,
            Kind::Ping => Query::Ping(self.word),
        }
    }
}

#[cfg(test)]
mod tests;
