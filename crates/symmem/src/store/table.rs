//! The keys, the values and who waits for what: the one meaning of every operation.
//!
//! `MemoryStore` and the TCP server both hold a `Table`. It knows neither threads nor sockets.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::limits::{MESSAGE_LEN, OVERHEAD, Refusal, at_most};
use crate::sync::Ordering;
use crate::sync::atomic::AtomicUsize;

/// A waiter: a connection of the server, or one waiting call.
pub(super) type Waiter = u64;

/// A value: in the table, and in answers that are under way.
#[derive(Clone)]
pub(super) struct Value(Arc<Stored>);

struct Stored {
    bytes: Vec<u8>,
    /// The bytes of all values that there are, in the table or not.
    alive: Arc<AtomicUsize>,
}

impl Value {
    fn new(mut bytes: Vec<u8>, alive: &Arc<AtomicUsize>) -> Self {
        bytes.shrink_to_fit();
        alive.fetch_add(bytes.len(), Ordering::Relaxed);
        Self(Arc::new(Stored { bytes, alive: Arc::clone(alive) }))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.alive.fetch_sub(self.bytes.len(), Ordering::Relaxed);
    }
}

pub(super) struct Table {
    entries: HashMap<Vec<u8>, Value>,
    /// What the entries take, and may take.
    size: usize,
    limit: usize,
    /// The bytes of the values among the entries, and of all that there are.
    listed: usize,
    alive: Arc<AtomicUsize>,
    /// By key that does not exist yet: who waits for it.
    awaited: HashMap<Vec<u8>, HashSet<Waiter>>,
    /// By waiter: the keys that have not appeared since it began to wait. Never an empty set.
    missing: HashMap<Waiter, HashSet<Vec<u8>>>,
    /// Those whose last key has appeared.
    woken: Vec<Waiter>,
}

impl Default for Table {
    fn default() -> Self {
        Self::with_limit(usize::MAX)
    }
}

impl Table {
    /// A table that refuses to grow beyond `limit` bytes.
    pub(super) fn with_limit(limit: usize) -> Self {
        Self {
            entries: HashMap::new(),
            size: 0,
            limit,
            listed: 0,
            alive: Arc::default(),
            awaited: HashMap::new(),
            missing: HashMap::new(),
            woken: Vec::new(),
        }
    }

    pub(super) fn set(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), Refusal> {
        let old = self.entries.get(&key).map(|old| old.bytes().len());
        let added = value.len() + if old.is_none() { key.len() + OVERHEAD } else { 0 };
        let size = (self.size - old.unwrap_or(0)).saturating_add(added);
        if size > self.limit && size > self.size {
            let expected = format!("a store of at most {} bytes in all", self.limit);
            return Err(Refusal::new(expected, format!("{size} bytes with the new value")));
        }
        self.size = size;
        self.listed = self.listed - old.unwrap_or(0) + value.len();
        self.wake(&key);
        let value = Value::new(value, &self.alive);
        self.entries.insert(key, value);
        Ok(())
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.entries.get(key).map(Value::bytes)
    }

    /// The value itself, which stays as it is whatever happens to the key.
    pub(super) fn value(&self, key: &[u8]) -> Option<Value> {
        self.entries.get(key).cloned()
    }

    /// The bytes of values that are in the table no more, and still in answers.
    pub(super) fn unlisted(&self) -> usize {
        self.alive.load(Ordering::Relaxed).saturating_sub(self.listed)
    }

    pub(super) fn add(&mut self, key: Vec<u8>, amount: i64) -> Result<i64, Refusal> {
        let old = match self.get(&key) {
            Some(value) => number(value)?,
            None => 0,
        };
        let sum = old
            .checked_add(amount)
            .ok_or_else(|| Refusal::new("a sum in 64 bits", format!("{old} + {amount}")))?;
        self.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    pub(super) fn contains_all<K: AsRef<[u8]>>(&self, keys: &[K]) -> bool {
        keys.iter().all(|key| self.entries.contains_key(key.as_ref()))
    }

    /// What the key holds afterwards; `expected`, as PyTorch answers, where it does not exist and should.
    pub(super) fn compare_set(
        &mut self,
        key: Vec<u8>,
        expected: Vec<u8>,
        new: Vec<u8>,
    ) -> Result<Value, Refusal> {
        match self.value(&key) {
            Some(current) if current.bytes() != expected => return Ok(current),
            None if !expected.is_empty() => return Ok(Value::new(expected, &self.alive)),
            Some(_) | None => self.set(key.clone(), new)?,
        }
        Ok(self.value(&key).unwrap_or_else(|| Value::new(Vec::new(), &self.alive)))
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        let Some(old) = self.entries.remove(key) else { return false };
        self.listed -= old.bytes().len();
        self.size -= old.bytes().len() + key.len() + OVERHEAD;
        true
    }

    pub(super) fn append(&mut self, key: Vec<u8>, value: &[u8]) -> Result<(), Refusal> {
        let old = self.get(&key).unwrap_or_default();
        at_most(MESSAGE_LEN, old.len() as u64 + value.len() as u64, "a total length")?;
        let fits = self.size.saturating_add(value.len()) <= self.limit;
        let stored = self.entries.get_mut(&key).and_then(|value| Arc::get_mut(&mut value.0));
        if let Some(stored) = stored.filter(|_| fits) {
            stored.bytes.extend_from_slice(value);
            stored.alive.fetch_add(value.len(), Ordering::Relaxed);
            self.size += value.len();
            self.listed += value.len();
            return Ok(());
        }
        // The key is new, or an answer has the value as it was.
        let whole = [self.get(&key).unwrap_or_default(), value].concat();
        self.set(key, whole)
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
        t.set(k("a"), vec![]).unwrap();
        t.delete(b"a");
        assert!(t.take_woken().is_empty());
        t.set(k("b"), vec![]).unwrap();
        assert_eq!(t.take_woken(), [7]);
        assert!(!t.is_waiting(7));
    }

    #[test]
    fn every_way_to_create_a_key_wakes() {
        let mut t = Table::default();
        for waiter in 0..4 {
            assert!(!t.wait(waiter, &[waiter.to_string()]));
        }
        t.set(k("0"), vec![]).unwrap();
        t.add(k("1"), 1).unwrap();
        t.append(k("2"), b"x").unwrap();
        t.compare_set(k("3"), vec![], k("new")).ok().unwrap();
        assert_eq!(t.take_woken(), [0, 1, 2, 3]);
    }

    #[test]
    fn a_cancelled_wait_leaves_nothing_behind() {
        let mut t = Table::default();
        assert!(!t.wait(1, &["a", "b"]));
        assert!(!t.wait(2, &["a"]));
        t.cancel(1);
        t.cancel(1);
        t.set(k("a"), vec![]).unwrap();
        t.set(k("b"), vec![]).unwrap();
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
        t.set(k("a"), vec![0; MESSAGE_LEN]).unwrap();
        assert!(t.append(k("a"), b"x").is_err());
        assert_eq!(t.get(b"a").map(<[u8]>::len), Some(MESSAGE_LEN));
    }

    #[test]
    fn a_full_table_refuses_what_would_make_it_larger_and_nothing_else() {
        let mut t = Table::with_limit(2 * OVERHEAD + 1000);
        t.set(k("a"), vec![0; 600]).unwrap();
        t.set(k("b"), vec![0; 300]).unwrap();
        let full = t.set(k("c"), vec![]).unwrap_err();
        assert!(full.expected.contains("in all"), "{full:?}");
        assert!(t.append(k("b"), &[0; 200]).is_err() && t.set(k("a"), vec![0; 700]).is_err());
        assert_eq!(
            (t.len(), t.get(b"a").unwrap().len(), t.get(b"b").unwrap().len()),
            (2, 600, 300)
        );
        t.set(k("a"), vec![1; 600]).unwrap();
        assert!(t.delete(b"b"));
        t.set(k("c"), vec![0; 390]).unwrap();
        assert!(t.delete(b"a") && t.delete(b"c") && !t.delete(b"c"));
        assert_eq!((t.size, t.listed, t.unlisted()), (0, 0, 0));
    }

    #[test]
    fn a_value_in_an_answer_stays_as_it_is_and_is_counted_once_it_is_replaced() {
        let mut t = Table::default();
        t.set(k("a"), vec![1; 100]).unwrap();
        let answer = t.value(b"a").unwrap();
        assert_eq!(t.unlisted(), 0);
        t.append(k("a"), &[2; 5]).unwrap();
        assert_eq!((answer.bytes(), t.unlisted()), (&[1; 100][..], 100));
        drop(answer);
        assert_eq!(t.unlisted(), 0);
    }
}
