//! The store of ranks that are threads of one process.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::limits::{check_entries, check_entry, check_key, check_keys, check_value};
use super::table::{Table, Waiter};
use super::{Store, timed_out};
use crate::error::Result;
use crate::sync::Deadline;

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
            state = match deadline.remaining() {
                None => self.appeared.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => {
                    state.table.cancel(waiter);
                    return None;
                }
                Some(left) => {
                    let woken = self.appeared.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
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
        self.change(|table| table.set(key.into(), value.to_vec()));
        Ok(())
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
        Ok(self.change(|table| table.compare_set(key.into(), expected.to_vec(), new.to_vec())))
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
            for (key, value) in entries {
                table.set((*key).into(), value.to_vec());
            }
        });
        Ok(())
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(i64::try_from(self.lock().table.len()).unwrap_or(i64::MAX))
    }
}
