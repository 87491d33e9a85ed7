//! The engine over UCX: one context with one worker, which threads use one at a time, under a lock.
#![allow(unsafe_code)] // S4

mod callbacks;
mod create;
mod endpoints;
mod lock;

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use self::callbacks::Sending;
use self::create::Handles;
use self::endpoints::Endpoints;
use self::lock::{WorkerGuard, WorkerLock};
use super::engine::{Body, Endpoint, Engine, Events, MAX_HEADER, Posted, Settings};
use super::raw::Asked;
use super::types::{self, Callback, RequestParams, operation};
use super::{Failure, Result, Ucx, Version, address};

/// The number of our messages among all that programs may define.
const MESSAGES: u32 = 0;

/// How long dropping an engine waits for what is pending.
const PATIENCE: Duration = Duration::from_secs(1);

/// An engine over UCX.
pub struct Worker {
    /// In memory of its own: the library's callbacks have its address.
    shared: ManuallyDrop<Box<Shared>>,
}

/// What calls and callbacks share.
struct Shared {
    ucx: Arc<Ucx>,
    handles: Handles,
    address: Vec<u8>,
    mixed_versions: bool,
    /// The library's descriptor under a number of ours, which nobody closes under a sleeper.
    descriptor: OwnedFd,
    events: Arc<dyn Events>,
    endpoints: Endpoints,
    lock: WorkerLock,
    /// Messages posted or being received.
    pending: AtomicUsize,
    /// Endpoints being closed.
    closing: AtomicUsize,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pending = self.pending();
        f.debug_struct("Worker").field("ucx", &self.shared.ucx).field("pending", &pending).finish()
    }
}

impl Worker {
    /// A context, a worker, its handler of messages and its address.
    pub(super) fn new(ucx: Arc<Ucx>, settings: &Settings, events: Arc<dyn Events>) -> Result<Self> {
        let handles = Handles::new(&ucx, settings)?;
        // What is made of them gives them back if something here fails.
        let made = handles.address(&ucx).and_then(|own| {
            let framed = address::wrap(ucx.version(), &own)?;
            Ok((framed, handles.descriptor(&ucx)?))
        });
        let (address, descriptor) = match made {
            Ok(made) => made,
            Err(failure) => {
                handles.destroy(&ucx);
                return Err(failure);
            }
        };
        let shared = Box::new(Shared {
            ucx,
            handles,
            address,
            mixed_versions: settings.mixed_versions,
            descriptor,
            events,
            endpoints: Endpoints::default(),
            lock: WorkerLock::default(),
            pending: AtomicUsize::new(0),
            closing: AtomicUsize::new(0),
        });
        // From here on its drop gives everything back.
        let worker = Self { shared: ManuallyDrop::new(shared) };
        worker.shared.handle_messages()?;
        Ok(worker)
    }
}

impl Shared {
    /// `ucp_am_send_nbx`
    fn post(&self, guard: &WorkerGuard<'_>, to: Endpoint, sending: Box<Sending>) -> Result<Posted> {
        let endpoint = match self.endpoints.raw(to) {
            Ok(endpoint) => endpoint,
            Err(failure) => {
                guard.drop_later(sending);
                return Err(failure);
            }
        };
        let sending = Box::into_raw(sending);
        // SAFETY: nobody else has it yet.
        let message = unsafe { &*sending };
        let (header, header_bytes) = message.header();
        let (body, bytes) = message.body();
        let params = RequestParams {
            mask: operation::CALLBACK | operation::USER_DATA,
            callback: Callback { sent: callbacks::sent },
            user_data: sending.expose_provenance(),
            ..RequestParams::default()
        };
        self.pending.fetch_add(1, Ordering::Relaxed);
        let send = self.ucx.c.ucp_am_send_nbx;
        // SAFETY: the endpoint is open, and nobody closes it while this thread holds the lock; header and body stay where they
        // are until the request is over, since the callback, or the line below, is the first to free them.
        let asked = unsafe { send(endpoint, MESSAGES, header, header_bytes, body, bytes, &params) };
        let asked = Asked::from(asked);
        if asked == Asked::Pending {
            return Ok(Posted::Pending);
        }
        self.pending.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the library is through with it and does not call back.
        guard.drop_later(unsafe { Box::from_raw(sending) });
        match asked {
            Asked::Failed(status) => Err(self.ucx.failure("ucp_am_send_nbx", status)),
            _ => Ok(Posted::Sent),
        }
    }

    /// `ucp_ep_close_nbx` by force.
    fn close(&self, endpoint: usize) -> Result<()> {
        let params = RequestParams {
            mask: operation::CALLBACK | operation::USER_DATA | operation::FLAGS,
            flags: types::CLOSE_FORCE,
            callback: Callback { sent: callbacks::closed },
            user_data: ptr::from_ref(self).expose_provenance(),
            ..RequestParams::default()
        };
        self.closing.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the endpoint was taken out of the table under this lock, so it is closed once and not used again; both
        // sides are in the mode in which closing by force is defined.
        let asked = Asked::from(unsafe { (self.ucx.c.ucp_ep_close_nbx)(endpoint, &params) });
        if asked == Asked::Pending {
            return Ok(());
        }
        self.closing.fetch_sub(1, Ordering::Relaxed);
        match asked {
            // That its connection has failed is no news: the endpoint is closed.
            Asked::Failed(status) => {
                let failure = self.ucx.failure("ucp_ep_close_nbx", status);
                if failure.is_disconnected() || failure.is_canceled() {
                    Ok(())
                } else {
                    Err(failure)
                }
            }
            _ => Ok(()),
        }
    }

    /// `ucp_worker_progress`, and closes the endpoints that have failed.
    fn progress(&self) -> usize {
        // SAFETY: the worker is there, and this thread holds the lock.
        let done = unsafe { (self.ucx.c.ucp_worker_progress)(self.handles.worker()) };
        for endpoint in self.endpoints.take_failed() {
            // Nobody has asked for it, and nobody could do more.
            let _ = self.close(endpoint);
        }
        usize::try_from(done).unwrap_or(usize::MAX)
    }

    /// What calls after `shutdown` get.
    fn stop(&self, guard: &WorkerGuard<'_>, patience: Duration) -> Result<()> {
        guard.stop();
        for endpoint in self.endpoints.take_all() {
            let _ = self.close(endpoint);
        }
        let begun = Instant::now();
        let busy = || {
            self.pending.load(Ordering::Relaxed) != 0 || self.closing.load(Ordering::Relaxed) != 0
        };
        while busy() && begun.elapsed() < patience {
            if self.progress() == 0 {
                std::thread::yield_now();
            }
        }
        let left = self.pending.load(Ordering::Relaxed);
        self.handles.destroy(&self.ucx);
        if left == 0 {
            return Ok(());
        }
        let text = format!("{left} messages were still pending after {patience:?}");
        Err(Failure::refused("shutdown", text))
    }
}

impl Engine for Worker {
    fn version(&self) -> Version {
        self.shared.ucx.version()
    }

    fn address(&self) -> &[u8] {
        &self.shared.address
    }

    fn connect(&self, address: &[u8]) -> Result<Endpoint> {
        let (version, address) = address::unwrap(address)?;
        let ours = self.version();
        if !self.shared.mixed_versions && !ours.understands(version) {
            let Version { major, minor, .. } = version;
            let text = format!("the peer has UCX {major}.{minor}, this process has {ours}");
            return Err(Failure::refused("connect", text));
        }
        let _guard = self.shared.lock.lock("connect")?;
        self.shared.connect(&address)
    }

    fn post(&self, to: Endpoint, header: &[u8], body: Body, token: u64) -> Result<Posted> {
        if header.len() > MAX_HEADER {
            let text = format!("a header of {} bytes, {MAX_HEADER} is the most", header.len());
            return Err(Failure::refused("post", text));
        }
        let sending = Sending::new(&self.shared, header, body, token);
        let guard = self.shared.lock.lock("post")?;
        self.shared.post(&guard, to, sending)
    }

    fn progress(&self) -> Result<usize> {
        match self.shared.lock.try_lock("progress")? {
            Some(_guard) => Ok(self.shared.progress()),
            None => Ok(0),
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.descriptor.as_fd()
    }

    fn arm(&self) -> Result<bool> {
        let _guard = self.shared.lock.lock("arm")?;
        // SAFETY: the worker is there, and this thread holds the lock.
        let status = unsafe { (self.shared.ucx.c.ucp_worker_arm)(self.shared.handles.worker()) };
        if status == Failure::BUSY {
            return Ok(false);
        }
        self.shared.ucx.check("ucp_worker_arm", status).map(|()| true)
    }

    fn wake(&self) -> Result<()> {
        let _guard = self.shared.lock.lock("wake")?;
        // SAFETY: the worker is there.
        let status = unsafe { (self.shared.ucx.c.ucp_worker_signal)(self.shared.handles.worker()) };
        self.shared.ucx.check("ucp_worker_signal", status)
    }

    fn close(&self, endpoint: Endpoint) -> Result<()> {
        let _guard = self.shared.lock.lock("close")?;
        match self.shared.endpoints.take(endpoint)? {
            Some(raw) => self.shared.close(raw),
            None => Ok(()),
        }
    }

    fn pending(&self) -> usize {
        self.shared.pending.load(Ordering::Relaxed)
    }

    fn shutdown(&self, patience: Duration) -> Result<()> {
        let guard = self.shared.lock.lock_last("shutdown")?;
        match guard {
            Some(guard) => self.shared.stop(&guard, patience),
            None => Ok(()),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Within an event nothing can be given back, since the library still runs: then all of it is leaked.
        let _ = self.shutdown(PATIENCE);
        if self.shared.lock.is_stopped() {
            // SAFETY: it is not used again: the library, whose callbacks have its address, was told to forget the worker.
            unsafe { ManuallyDrop::drop(&mut self.shared) };
        }
    }
}
