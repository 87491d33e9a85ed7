//! The caller's streams, by address.
#![allow(unsafe_code)] // S4 (streams live as documented for users)

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use symmem::cuda::{self, Gpu, Stream};

use crate::wait::detached;

/// Streams that are never destroyed, by device and address: calls in them need no set-up, and no record of unfinished work.
static KEPT: Mutex<Streams> = Mutex::new(Streams::new());

type Streams = BTreeMap<(u32, usize), Arc<Stream>>;

fn kept() -> MutexGuard<'static, Streams> {
    // Nothing is done under the lock that could leave the table half changed.
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a stream of `cuda:device` that is never destroyed, as torch's are not. Calls in it are faster.
#[pyfunction]
pub(crate) fn keep_stream(py: Python<'_>, device: u32, stream: usize) -> PyResult<()> {
    detached(py, || {
        keep(&Gpu::open(device)?, stream);
        Ok(())
    })
}

fn keep(gpu: &Gpu, raw: usize) -> Arc<Stream> {
    let mut kept = kept();
    let known = kept.entry((gpu.number(), raw));
    // SAFETY: a stream of the device, which is never destroyed: as documented for users.
    Arc::clone(known.or_insert_with(|| Arc::new(unsafe { Stream::from_raw(gpu, raw) })))
}

/// The streams that the library's calls on some memory went into.
pub(crate) struct Used {
    gpu: Gpu,
    last: AtomicUsize,
    all: Mutex<BTreeSet<usize>>,
}

impl Used {
    pub(crate) fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone(), last: AtomicUsize::new(usize::MAX), all: Mutex::default() }
    }

    /// Records a call in a stream.
    pub(crate) fn note(&self, raw: usize) {
        // Most use the same stream as the one before.
        if self.last.swap(raw, Ordering::Relaxed) != raw {
            self.all.lock().unwrap_or_else(PoisonError::into_inner).insert(raw);
        }
    }

    /// Waits for the library's calls in streams other than the consumer's.
    pub(crate) fn finish_for(&self, consumer: usize) -> symmem::Result<()> {
        let others: Vec<usize> = {
            let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
            all.iter().copied().filter(|raw| *raw != consumer).collect()
        };
        for raw in &others {
            // SAFETY: a stream of the device, which lives as long as what is in it: as documented for users.
            unsafe { Stream::from_raw(&self.gpu, *raw) }.synchronize()?;
        }
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|raw| !others.contains(raw));
        self.last.store(usize::MAX, Ordering::Relaxed);
        Ok(())
    }
}

/// Whether a stream is known never to be destroyed.
pub(crate) fn is_kept(device: u32, raw: usize) -> bool {
    raw == 0 || kept().contains_key(&(device, raw))
}

/// The caller's stream; the default stream always exists.
pub(crate) fn stream_of(device: &cuda::Symmetric<u8>, raw: usize) -> Arc<Stream> {
    let gpu = device.gpu();
    if raw == 0 {
        return keep(gpu, raw);
    }
    let known = kept().get(&(gpu.number(), raw)).cloned();
    // SAFETY: a stream of the device, which lives as long as what is in it: as documented for users.
    known.unwrap_or_else(|| Arc::new(unsafe { Stream::from_raw(gpu, raw) }))
}
