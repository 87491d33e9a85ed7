//! A part of another store, for those whose keys must be kept apart.

use super::{SharedStore, Store};
use crate::error::Result;
use crate::sync::Deadline;

/// The keys of another store that start with `prefix/`; the same ones as of PyTorch's `PrefixStore`.
pub struct PrefixStore {
    prefix: String,
    store: SharedStore,
}

impl PrefixStore {
    /// The part of `store` under `prefix`.
    pub fn new(prefix: impl Into<String>, store: SharedStore) -> Self {
        Self { prefix: prefix.into(), store }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn keys(&self, keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| self.key(key)).collect()
    }
}

fn borrowed(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.key(key), value)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.store.get(&self.key(key), deadline)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(&self.key(key), amount)
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.store.wait(&borrowed(&self.keys(keys)), deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(&self.key(key), expected, new)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.store.check(&borrowed(&self.keys(keys)))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(&self.key(key))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(&self.key(key), value)
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.store.multi_get(&borrowed(&self.keys(keys)), deadline)
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<String> = entries.iter().map(|(key, _)| self.key(key)).collect();
        let entries: Vec<(&str, &[u8])> =
            keys.iter().zip(entries).map(|(key, (_, value))| (key.as_str(), *value)).collect();
        self.store.multi_set(&entries)
    }

    /// How many keys the whole store has, as with PyTorch: a part does not know its own number.
    fn num_keys(&self) -> Result<i64> {
        self.store.num_keys()
    }

    fn until(&self, deadline: Deadline) -> Option<SharedStore> {
        let store = self.store.until(deadline)?;
        Some(std::sync::Arc::new(Self { prefix: self.prefix.clone(), store }))
    }

    fn local_address(&self) -> Option<std::net::IpAddr> {
        self.store.local_address()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }
}

impl std::fmt::Debug for PrefixStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixStore").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}
