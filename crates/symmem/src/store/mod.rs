//! A small key-value store that all ranks of a job can reach: how they find each other.
//!
//! It is used while connecting and by ranks on different hosts; once the mesh stands, nothing fast goes through it.
//! [`MemoryStore`] serves ranks that are threads; [`TcpServer`] and [`TcpStore`] serve processes, and speak
//! PyTorch's wire format, so either end may be torch's; [`PrefixStore`] is a part of any store.

mod connection;
mod limits;
mod local_peer;
mod memory;
mod prefix;
mod seal;
mod session;
mod socket_query;
mod stream;
mod table;
mod tcp_client;
mod tcp_server;
mod trim;
mod wire;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::sync::{Deadline, Expiry};

pub use limits::{MAX_KEY_LEN, MAX_KEYS, MAX_VALUE_LEN};
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub(crate) use seal::Seal;
#[cfg(fuzzing)]
#[doc(hidden)]
pub use session::fuzzing;
pub use tcp_client::{CALL_LIMIT, TcpStore};
pub use tcp_server::TcpServer;

/// Keys and values shared by all ranks. Every call that can wait takes a [`Deadline`].
pub trait Store: Send + Sync {
    /// Sets `key` to `value`, and wakes those that wait for it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists and returns its value.
    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>>;

    /// Adds to the decimal number under `key` (0 when absent) and returns the sum.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Waits until all `keys` exist.
    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()>;

    /// Sets `key` to `new` if it holds `expected` (empty: if it does not exist); returns what it holds afterwards.
    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>>;

    /// Whether all `keys` exist.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key`; whether it existed.
    fn delete(&self, key: &str) -> Result<bool>;

    /// Appends to the value under `key`, creating it if absent.
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until all `keys` exist and returns their values in order.
    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>>;

    /// Sets several keys at once.
    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()>;

    /// How many keys there are.
    fn num_keys(&self) -> Result<i64>;

    /// The same store, whose calls all end soon after `deadline`, also those that are given none; `None` where no such call
    /// can last.
    fn until(&self, deadline: Deadline) -> Option<SharedStore> {
        let _ = deadline;
        None
    }

    /// The address of this host by which the store is reached over TCP: ranks of other hosts reach this one there, unless they
    /// are told otherwise.
    fn local_address(&self) -> Option<std::net::IpAddr> {
        None
    }

    /// What errors call it, and who hosts it if that is known.
    fn describe(&self) -> String {
        "the store".to_owned()
    }
}

/// A store shared by several owners.
pub type SharedStore = Arc<dyn Store>;

fn timed_out(op: &'static str, deadline: Deadline) -> Error {
    let why = deadline.expiry().unwrap_or(Expiry::Deadline);
    why.error(op, Vec::new(), deadline.elapsed())
}
