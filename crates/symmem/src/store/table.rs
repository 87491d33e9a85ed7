//! The keys, the values and who waits for what: the one meaning of every operation.
//!
//! `MemoryStore` and the TCP server both hold a `Table`. It knows neither threads nor sockets.

use std::collections::{HashMap, HashSet};

use super::limits::{MESSAGE_LEN, Refusal, at_most};

/// Whoever waits: a connection of the server, or one waiting call.
pub(super) type Waiter = u64;

#[derive(Default)]
pub(super) struct Table {
    entries: HashMap<Vec<u8>, Vec<u8>>,
    /// By key that does not exist yet: who waits for it.
    awaited: HashMap<Vec<u8>, HashSet<Waiter>>,
    /// By waiter: the keys that have not appeared since it began to wait. Never an empty set.
    missing: HashMap<Waiter, HashSet<Vec<u8>>>,
    /// Those whose last key has appeared.
    woken: Vec<Waiter>,
}

impl Table {
    pub(super) fn set(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.wake(&key);
        self.entries.insert(key, value);
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.entries.get(key).map(Vec::as_slice)
    }

    pub(super) fn add(&mut self, key: Vec<u8>, amount: i64) -> Result<i64, Refusal> {
        let old = match self.entries.get(&key) {
            Some(value) => number(value)?,
            None => 0,
        };
        let sum = old
            .checked_add(amount)
            .ok_or_else(|| Refusal::new("a sum in 64 bits", format!("{old} + {amount}")))?;
        self.set(key, sum.to_string().into_bytes());
        Ok(sum)
    }

    pub(super) fn contains_all<K: AsRef<[u8]>>(&self, keys: &[K]) -> bool {
        keys.iter().all(|key| self.entries.contains_key(key.as_ref()))
    }

    /// What the key holds afterwards; `expected`, as PyTorch answers, where it does not exist and should.
    pub(super) fn compare_set(&mut self, key: Vec<u8>, expected: Vec<u8>, new: Vec<u8>) -> Vec<u8> {
        match self.entries.get(&key) {
            Some(current) if *current != expected => current.clone(),
            None if !expected.is_empty() => expected,
            Some(_) | None => {
                self.set(key, new.clone());
                new
            }
        }
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        self.entries.remove(key).is_some()
    }

    pub(super) fn append(&mut self, key: Vec<u8>, value: &[u8]) -> Result<(), Refusal> {
        self.wake(&key);
        let stored = self.entries.entry(key).or_default();
        let len = stored.len() as u64 + value.len() as u64;
        at_most(MESSAGE_LEN, len, "a total length")?;
        stored.extend_from_slice(value);
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether all keys exist. If not, `waiter` will be among `take_woken` once each has existed.
    pub(super) fn wait<K: AsRef<[u8]>>(&mut self, waiter: Waiter, keys: &[K]) -> bool {
        let absent = keys.iter().map(AsRef::as_ref).filter(|key| !self.entries.contains_key(*key));
        let missing: HashSet<Vec<u8>> = absent.map(<[u8]>::to_vec).collect();
        if missing.is_empty() {
            return true;
        }
        for key in &missing {
            self.awaited.entry(key.clone()).or_default().insert(waiter);
        }
        self.missing.insert(waiter, missing);
        false
    }

    pub(super) fn is_waiting(&self, waiter: Waiter) -> bool {
        self.missing.contains_key(&waiter)
    }

    /// Ends the wait of `waiter`, if any.
    pub(super) fn cancel(&mut self, waiter: Waiter) {
        for key in self.missing.remove(&waiter).unwrap_or_default() {
            if let Some(waiters) = self.awaited.get_mut(&key) {
                waiters.remove(&waiter);
                if waiters.is_empty() {
                    self.awaited.remove(&key);
                }
            }
        }
    }

    /// Those whose wait has ended since the last call.
    pub(super) fn take_woken(&mut self) -> Vec<Waiter> {
        std::mem::take(&mut self.woken)
    }

    /// Whether the wait of `waiter` has ended since the last call of either; then it has been told.
    pub(super) fn take_woken_one(&mut self, waiter: Waiter) -> bool {
        let before = self.woken.len();
        self.woken.retain(|woken| *woken != waiter);
        self.woken.len() < before
    }

    fn wake(&mut self, key: &[u8]) {
        for waiter in self.awaited.remove(key).unwrap_or_default() {
            let Some(missing) = self.missing.get_mut(&waiter) else { continue };
            missing.remove(key);
            if missing.is_empty() {
                self.missing.remove(&waiter);
                self.woken.push(waiter);
            }
        }
    }
}

fn number(value: &[u8]) -> Result<i64, Refusal> {
    let text = String::from_utf8_lossy(value);
    let number = text.trim().parse();
    number.map_err(|_| {
        let shown: String = text.chars().take(32).collect();
        Refusal::new("a decimal number in 64 bits under the key", format!("{shown:?}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn k(key: &str) -> Vec<u8> {
        key.as_bytes().to_vec()
    }

    #[test]
    fn a_waiter_wakes_once_each_key_has_existed_even_if_not_at_once() {
        let mut t = Table::default();
        assert!(!t.wait(7, &["a", "b", "a"]));
        t.set(k("a"), vec![]);
        t.delete(b"a");
        assert!(t.take_woken().is_empty());
        t.set(k("b"), vec![]);
        assert_eq!(t.take_woken(), [7]);
        assert!(!t.is_waiting(7));
    }

    #[test]
    fn every_way_to_create_a_key_wakes() {
        let mut t = Table::default();
        for waiter in 0..4 {
            assert!(!t.wait(waiter, &[waiter.to_string()]));
        }
        t.set(k("0"), vec![]);
        t.add(k("1"), 1).unwrap();
        t.append(k("2"), b"x").unwrap();
        t.compare_set(k("3"), vec![], k("new"));
        assert_eq!(t.take_woken(), [0, 1, 2, 3]);
    }

    #[test]
    fn a_cancelled_wait_leaves_nothing_behind() {
        let mut t = Table::default();
        assert!(!t.wait(1, &["a", "b"]));
        assert!(!t.wait(2, &["a"]));
        t.cancel(1);
        t.cancel(1);
        t.set(k("a"), vec![]);
        t.set(k("b"), vec![]);
        assert_eq!(t.take_woken(), [2]);
        assert!(t.awaited.is_empty() && t.missing.is_empty());
    }

    #[test]
    fn a_sum_beyond_64_bits_is_refused_and_changes_nothing() {
        let mut t = Table::default();
        assert_eq!(t.add(k("n"), i64::MAX), Ok(i64::MAX));
        assert!(t.add(k("n"), 1).is_err());
        assert_eq!(t.add(k("n"), -1), Ok(i64::MAX - 1));
    }

    #[test]
    fn an_append_beyond_the_limit_is_refused() {
        let mut t = Table::default();
        t.set(k("a"), vec![0; MESSAGE_LEN]);
        assert!(t.append(k("a"), b"x").is_err());
        assert_eq!(t.get(b"a").map(<[u8]>::len), Some(MESSAGE_LEN));
    }
}
