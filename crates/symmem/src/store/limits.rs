//! What a store takes: the sizes that hold for every implementation, and how a refusal reads.
//!
//! They are PyTorch's, so that nothing works on threads that would fail on a torch server.

use crate::error::{Error, Result};

/// The longest key. One byte less than on the wire, where every key starts with a slash.
pub const MAX_KEY_LEN: usize = WIRE_KEY_LEN - 1;

/// The longest value of one call.
pub const MAX_VALUE_LEN: usize = 8 << 20;

/// The most keys of one call.
pub const MAX_KEYS: usize = 128 << 10;

pub(super) const WIRE_KEY_LEN: usize = 8 << 10;

/// The longest query and (for `append`, which can exceed the value of one call) stored value: room for the two values of
/// one `compare_set`.
pub(super) const MESSAGE_LEN: usize = 17 << 20;

/// The longest answer. It costs the server nothing but what is small in it: large values are sent from where they lie.
pub(super) const ANSWER_LEN: usize = 64 << 20;

/// What all keys and values of a server may take together.
pub(super) const TABLE_LEN: usize = 20 << 20;

/// What all clients of a server may hold together: input that is no query yet, output that they do not read, and values
/// that only such output still needs.
pub(super) const CLIENTS_LEN: usize = 18 << 20;

/// What an entry, or a key in a query, takes apart from its bytes; rather too much than too little.
pub(super) const OVERHEAD: usize = 128;

/// Why a query is not carried out.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) expected: String,
    pub(super) got: String,
}

impl Refusal {
    pub(super) fn new(expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { expected: expected.into(), got: got.into() }
    }

    /// What the caller of `op` hears.
    pub(super) fn usage(self, op: &'static str) -> Error {
        Error::Usage { op, rank: None, expected: self.expected, got: self.got }
    }
}

/// Refuses `len` above `most`.
pub(super) fn at_most(most: usize, len: u64, what: &str) -> Result<usize, Refusal> {
    match usize::try_from(len) {
        Ok(len) if len <= most => Ok(len),
        _ => Err(Refusal::new(format!("{what} of at most {most}"), len.to_string())),
    }
}

pub(super) fn check_keys(op: &'static str, keys: &[&str]) -> Result<()> {
    at_most(MAX_KEYS, keys.len() as u64, "a number of keys").map_err(|r| r.usage(op))?;
    keys.iter().try_for_each(|key| check_key(op, key))
}

pub(super) fn check_key(op: &'static str, key: &str) -> Result<()> {
    at_most(MAX_KEY_LEN, key.len() as u64, "a key length").map_err(|r| r.usage(op)).map(drop)
}

pub(super) fn check_value(op: &'static str, value: &[u8]) -> Result<()> {
    at_most(MAX_VALUE_LEN, value.len() as u64, "a value length").map_err(|r| r.usage(op)).map(drop)
}

/// The checks of a call with one key and one value.
pub(super) fn check_entry(op: &'static str, key: &str, value: &[u8]) -> Result<()> {
    check_key(op, key)?;
    check_value(op, value)
}

/// The checks of `multi_set`.
pub(super) fn check_entries(op: &'static str, entries: &[(&str, &[u8])]) -> Result<()> {
    at_most(MAX_KEYS, entries.len() as u64, "a number of keys").map_err(|r| r.usage(op))?;
    entries.iter().try_for_each(|(key, value)| check_entry(op, key, value))
}
