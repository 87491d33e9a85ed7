//! The table of endpoints. Nobody holds its lock while the library runs.
#![allow(unsafe_code)] // S4

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Shared, callbacks};
use crate::ucx::types::{self, EndpointParams, ErrorHandler, endpoint_field};
use crate::ucx::{Endpoint, Failure, Result};

/// All endpoints that there were.
#[derive(Default)]
pub(super) struct Endpoints {
    table: Mutex<Vec<Slot>>,
    /// Some have failed and are to be closed.
    some_failed: AtomicBool,
}

struct Slot {
    /// The library's handle; 0 once it is being closed.
    raw: usize,
    /// Why it cannot be used any more.
    failure: Option<Failure>,
}

impl Endpoints {
    /// The library's handle of an endpoint that can be used.
    pub(super) fn raw(&self, endpoint: Endpoint) -> Result<usize> {
        let table = self.lock();
        let slot = table.get(endpoint.0).ok_or_else(unknown)?;
        match &slot.failure {
            Some(failure) => Err(Failure { call: "post", ..failure.clone() }),
            None if slot.raw == 0 => Err(closed()),
            None => Ok(slot.raw),
        }
    }

    /// Takes out an endpoint's handle, to be closed, unless that was done.
    pub(super) fn take(&self, endpoint: Endpoint) -> Result<Option<usize>> {
        let mut table = self.lock();
        let slot = table.get_mut(endpoint.0).ok_or_else(unknown)?;
        Ok(slot.take())
    }

    /// Takes out the handles of those that have failed.
    pub(super) fn take_failed(&self) -> Vec<usize> {
        if !self.some_failed.load(Ordering::Relaxed) {
            return Vec::new();
        }
        self.some_failed.store(false, Ordering::Relaxed);
        let mut table = self.lock();
        table.iter_mut().filter(|slot| slot.failure.is_some()).filter_map(Slot::take).collect()
    }

    /// Takes out all handles.
    pub(super) fn take_all(&self) -> Vec<usize> {
        self.lock().iter_mut().filter_map(Slot::take).collect()
    }

    /// Notes that the endpoint of this handle has failed; which it is.
    pub(super) fn fail(&self, raw: usize, failure: &Failure) -> Option<Endpoint> {
        let mut table = self.lock();
        let index = table.iter().position(|slot| slot.raw == raw)?;
        table.get_mut(index)?.failure = Some(failure.clone());
        self.some_failed.store(true, Ordering::Relaxed);
        Some(Endpoint(index))
    }

    fn add(&self, raw: usize) -> Endpoint {
        let mut table = self.lock();
        table.push(Slot { raw, failure: None });
        Endpoint(table.len() - 1)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    fn take(&mut self) -> Option<usize> {
        let raw = std::mem::take(&mut self.raw);
        (raw != 0).then_some(raw)
    }
}

fn unknown() -> Failure {
    Failure::refused("endpoint", "not an endpoint of this engine")
}

fn closed() -> Failure {
    let text = "the endpoint is closed".to_owned();
    Failure { call: "post", status: Some(Failure::CANCELED), text }
}

impl Shared {
    /// `ucp_ep_create`, by a thread that holds the worker's lock; `address` is out of its frame.
    pub(super) fn connect(&self, address: &[u8]) -> Result<Endpoint> {
        let fields = endpoint_field::REMOTE_ADDRESS
            | endpoint_field::ERR_HANDLING_MODE
            | endpoint_field::ERR_HANDLER;
        let params = EndpointParams {
            field_mask: fields,
            address: address.as_ptr().expose_provenance(),
            err_mode: types::ERR_HANDLING_PEER,
            err_handler: ErrorHandler {
                callback: Some(callbacks::failed),
                argument: ptr::from_ref(self).expose_provenance(),
            },
            ..EndpointParams::default()
        };
        let mut raw = 0;
        // SAFETY: the worker is there; the address has come as a peer's library has written it, and zeros follow; what the
        // callback gets stays until the worker is destroyed.
        let status =
            unsafe { (self.ucx.c.ucp_ep_create)(self.handles.worker(), &params, &mut raw) };
        self.ucx.check("ucp_ep_create", status)?;
        Ok(self.endpoints.add(raw))
    }
}
