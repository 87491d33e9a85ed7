//! A store in Python, such as those of `torch.distributed`, through which ranks find each other.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use symmem::store::Store;
use symmem::{Deadline, Error, Result};

/// An object with the methods of `torch.distributed.Store`.
pub(crate) struct PythonStore(pub(crate) Py<PyAny>);

impl PythonStore {
    fn call<R>(&self, ask: impl for<'py> FnOnce(&Bound<'py, PyAny>) -> PyResult<R>) -> Result<R> {
        let answer = Python::try_attach(|py| ask(self.0.bind(py)).map_err(|e| e.to_string()));
        answer
            .unwrap_or_else(|| Err("Python is shutting down".to_owned()))
            .map_err(|got| Error::protocol("the store", "an answer", got))
    }
}

impl Store for PythonStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(|store| store.call_method1("set", (key, bytes(store, value))).map(drop))
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.wait(&[key], deadline)?;
        self.call(|store| store.call_method1("get", (key,))?.extract())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.call(|store| store.call_method1("add", (key, amount))?.extract())
    }

    /// Polls, because a store's own wait could not be interrupted.
    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let deadline = deadline.start();
        while !self.check(keys)? {
            if deadline.expired() {
                return Err(Error::timeout("store", vec![], deadline.elapsed()));
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        Ok(())
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>> {
        self.call(|store| {
            let (expected, new) = (bytes(store, expected), bytes(store, new));
            store.call_method1("compare_set", (key, expected, new))?.extract()
        })
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.call(|store| store.call_method1("check", (keys.to_vec(),))?.extract())
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.call(|store| store.call_method1("delete_key", (key,))?.extract())
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(|store| store.call_method1("append", (key, bytes(store, value))).map(drop))
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let deadline = deadline.start();
        keys.iter().map(|key| self.get(key, deadline)).collect()
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        entries.iter().try_for_each(|(key, value)| self.set(key, value))
    }

    fn num_keys(&self) -> Result<i64> {
        self.call(|store| store.call_method0("num_keys")?.extract())
    }
}

fn bytes<'py>(store: &Bound<'py, PyAny>, value: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(store.py(), value)
}
