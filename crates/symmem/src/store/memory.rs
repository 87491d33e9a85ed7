//! The store of ranks that are threads of one process.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::limits::{Refusal, check_entries, check_entry, check_key, check_keys, check_value};
use super::table::{Table, Waiter};
use super::{Store, timed_out};
use crate::error::Result;
use crate::sync::Deadline;

/// How long a wait sleeps before it asks again whether it should end.
const NAP: Duration = Duration::from_millis(50);

/// A store in this process's memory. Share it between ranks as a [`SharedStore`](super::SharedStore).
#[derive(Default)]
pub struct MemoryStore {
    state: Mutex<State>,
    /// Rung whenever somebody's wait has ended.
    appeared: Condvar,
}

#[derive(Default)]
struct State {
    table: Table,
    /// How many waits there have been: their names in the table.
    waits: Waiter,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// The table may be used after a panic elsewhere: none of its operations stops halfway.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state.table);
        if !state.table.take_woken().is_empty() {
            self.appeared.notify_all();
        }
        result
    }

    /// Waits until each key has existed, or answers `None` at the deadline.
    fn await_keys<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        keys: &[&str],
        deadline: Deadline,
    ) -> Option<MutexGuard<'a, State>> {
        state.waits += 1;
        let waiter = state.waits;
        if state.table.wait(waiter, keys) {
            return Some(state);
        }
        while state.table.is_waiting(waiter) {
            if deadline.remaining() == Some(Duration::ZERO) {
                state.table.cancel(waiter);
                return None;
            }
            let woken = self.appeared.wait_timeout(state, deadline.nap(NAP));
            drop(woken.unwrap_or_else(PoisonError::into_inner));
            // The callback that may end the wait may use this store.
            let ended = deadline.expired();
            state = self.lock();
            if ended && state.table.is_waiting(waiter) {
                state.table.cancel(waiter);
                return None;
            }
        }
        Some(state)
    }

    fn read(&self, op: &'static str, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        check_keys(op, keys)?;
        let deadline = deadline.start();
        let mut state = self.lock();
        // More than once only if a key was deleted again before this thread woke up.
        loop {
            let waited = self.await_keys(state, keys, deadline);
            state = waited.ok_or_else(|| timed_out(op, deadline))?;
            let values = keys.iter().map(|key| state.table.get(key.as_bytes()).map(<[u8]>::to_vec));
            if let Some(values) = values.collect() {
                return Ok(values);
            }
        }
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_entry("set", key, value)?;
        self.change(|table| table.set(key.into(), value.to_vec())).map_err(|r| r.usage("set"))
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let mut values = self.read("get", &[key], deadline)?;
        Ok(values.pop().unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        check_key("add", key)?;
        self.change(|table| table.add(key.into(), amount)).map_err(|r| r.usage("add"))
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        check_keys("wait", keys)?;
        let deadline = deadline.start();
        let waited = self.await_keys(self.lock(), keys, deadline);
        waited.map(drop).ok_or_else(|| timed_out("wait", deadline))
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>> {
        check_entry("compare_set", key, new)?;
        check_value("compare_set", expected)?;
        let swap = |table: &mut Table| {
            let held = table.compare_set(key.into(), expected.to_vec(), new.to_vec())?;
            Ok(held.bytes().to_vec())
        };
        self.change(swap).map_err(|r: Refusal| r.usage("compare_set"))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        check_keys("check", keys)?;
        Ok(self.lock().table.contains_all(keys))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        check_key("delete", key)?;
        Ok(self.lock().table.delete(key.as_bytes()))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        check_entry("append", key, value)?;
        self.change(|table| table.append(key.into(), value)).map_err(|r| r.usage("append"))
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.read("multi_get", keys, deadline)
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        check_entries("multi_set", entries)?;
        self.change(|table| {
            entries.iter().try_for_each(|(key, value)| table.set((*key).into(), value.to_vec()))
        })
        .map_err(|r| r.usage("multi_set"))
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(i64::try_from(self.lock().table.len()).unwrap_or(i64::MAX))
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}
