//! What the library calls, from within its own calls. Nothing here unwinds, and nothing calls the library's progress.
#![allow(unsafe_code)] // S4

use std::ffi::c_void;
use std::ptr;
use std::slice;
use std::sync::atomic::Ordering;

use super::Shared;
use crate::ucx::engine::{Answer, Body, Data, MAX_HEADER, ReceiveBuffer};
use crate::ucx::raw::Asked;
use crate::ucx::types::{
    self, Callback, HandlerParams, ReceiveParams, RequestParams, Status, handler_field, operation,
};
use crate::ucx::{Failure, Result};

/// A message that is being sent.
pub(super) struct Sending {
    shared: *const Shared,
    token: u64,
    header: [u8; MAX_HEADER],
    header_bytes: usize,
    body: Body,
}

impl Sending {
    /// A message with a header of at most [`MAX_HEADER`] bytes.
    pub(super) fn new(shared: &Shared, header: &[u8], body: Body, token: u64) -> Box<Self> {
        let header_bytes = header.len().min(MAX_HEADER);
        let mut kept = [0; MAX_HEADER];
        for (to, from) in kept.iter_mut().zip(header) {
            *to = *from;
        }
        Box::new(Self { shared: ptr::from_ref(shared), token, header: kept, header_bytes, body })
    }

    /// Where the header lies.
    pub(super) fn header(&self) -> (*const c_void, usize) {
        (self.header.as_ptr().cast(), self.header_bytes)
    }

    /// Where the body lies.
    pub(super) fn body(&self) -> (*const c_void, usize) {
        (self.body.start().cast(), self.body.len())
    }
}

/// A body that is being received.
struct Receiving {
    shared: *const Shared,
    token: u64,
    buffer: ReceiveBuffer,
}

impl Shared {
    /// Has the library call [`arrived`].
    pub(super) fn handle_messages(&self) -> Result<()> {
        let fields =
            handler_field::ID | handler_field::FLAGS | handler_field::CB | handler_field::ARG;
        let params = HandlerParams {
            field_mask: fields,
            id: super::MESSAGES,
            flags: types::WHOLE_MESSAGE,
            callback: Some(arrived),
            argument: ptr::from_ref(self).expose_provenance(),
            ..HandlerParams::default()
        };
        let set = self.ucx.c.ucp_worker_set_am_recv_handler;
        // SAFETY: the worker is there, and what the callback gets stays until the worker is destroyed.
        let status = unsafe { set(self.handles.worker(), &params) };
        self.ucx.check("ucp_worker_set_am_recv_handler", status)
    }

    /// An operation's end.
    fn result(&self, call: &'static str, status: Status) -> Result<()> {
        self.ucx.check(call, status)
    }

    /// Tells of a message, and begins to receive its body if that is wanted.
    fn message(&self, header: &[u8], body: Arrived<'_>) -> Status {
        if header.len() > MAX_HEADER {
            // None of ours.
            return body.refused();
        }
        let data = match body {
            Arrived::Here(bytes) => Data::Inline(bytes),
            Arrived::Elsewhere(_, bytes) => Data::Rendezvous(bytes),
        };
        let answer = self.lock.tell(|| self.events.message(header, data));
        match answer {
            Some(Answer::Done) => types::OK,
            Some(Answer::Refuse) | None => body.refused(),
            Some(Answer::Receive { buffer, token }) => self.receive(body, buffer, token),
        }
    }

    /// Receives a body into its buffer.
    fn receive(&self, body: Arrived<'_>, mut buffer: ReceiveBuffer, token: u64) -> Status {
        let descriptor = match body {
            Arrived::Here(bytes) => {
                let result =
                    if buffer.take(bytes) { Ok(()) } else { Err(too_small(&buffer, bytes.len())) };
                self.lock.tell(|| self.events.received(token, buffer, result));
                return types::OK;
            }
            Arrived::Elsewhere(_, bytes) if bytes > buffer.len() => {
                let result = Err(too_small(&buffer, bytes));
                self.lock.tell(|| self.events.received(token, buffer, result));
                return body.refused();
            }
            Arrived::Elsewhere(descriptor, bytes) => (descriptor, bytes),
        };
        let (descriptor, bytes) = descriptor;
        let start = buffer.start().cast();
        let receiving = Box::new(Receiving { shared: ptr::from_ref(self), token, buffer });
        let receiving = Box::into_raw(receiving);
        let params = RequestParams {
            mask: operation::CALLBACK | operation::USER_DATA,
            callback: Callback { received },
            user_data: receiving.expose_provenance(),
            ..RequestParams::default()
        };
        self.pending.fetch_add(1, Ordering::Relaxed);
        let receive = self.ucx.c.ucp_am_recv_data_nbx;
        // SAFETY: the descriptor is the one that the library has just handed over; the buffer has room for the body, and
        // stays until the callback, or the lines below, free it.
        let asked = unsafe { receive(self.handles.worker(), descriptor, start, bytes, &params) };
        let status = match Asked::from(asked) {
            Asked::Pending => return types::IN_PROGRESS,
            Asked::Done => types::OK,
            Asked::Failed(status) => status,
        };
        // SAFETY: the library is through with it and does not call back.
        self.is_received(*unsafe { Box::from_raw(receiving) }, status);
        types::IN_PROGRESS
    }

    fn is_received(&self, receiving: Receiving, status: Status) {
        self.pending.fetch_sub(1, Ordering::Relaxed);
        let result = self.result("ucp_am_recv_data_nbx", status);
        let Receiving { token, buffer, .. } = receiving;
        self.lock.tell(|| self.events.received(token, buffer, result));
    }
}

/// The body of a message, where it is.
#[derive(Clone, Copy)]
enum Arrived<'a> {
    Here(&'a [u8]),
    /// With the sender: the library's descriptor, and bytes.
    Elsewhere(*mut c_void, usize),
}

impl Arrived<'_> {
    /// What tells the library that it is not wanted.
    fn refused(self) -> Status {
        match self {
            Self::Here(_) => types::OK,
            Self::Elsewhere(..) => Failure::REJECTED,
        }
    }
}

fn too_small(buffer: &ReceiveBuffer, bytes: usize) -> Failure {
    let text = format!("a body of {bytes} bytes, for a buffer of {}", buffer.len());
    Failure { call: "receive", status: Some(Failure::TRUNCATED), text }
}

/// `ucp_am_recv_callback_t`
unsafe extern "C" fn arrived(
    shared: *mut c_void,
    header: *const c_void,
    header_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    params: *const ReceiveParams,
) -> Status {
    // SAFETY: it is what `handle_messages` has handed over.
    let shared = unsafe { &*shared.cast_const().cast::<Shared>() };
    // SAFETY: the library gives parameters with every message.
    let attributes = unsafe { (*params).attributes };
    let header: &[u8] = if header_bytes == 0 {
        &[]
    } else {
        // SAFETY: so many bytes of header are there until this function returns.
        unsafe { slice::from_raw_parts(header.cast(), header_bytes) }
    };
    let body = if attributes & types::RENDEZVOUS != 0 {
        Arrived::Elsewhere(data, bytes)
    } else if bytes == 0 {
        Arrived::Here(&[])
    } else {
        // SAFETY: so many bytes of data are there until this function returns.
        Arrived::Here(unsafe { slice::from_raw_parts(data.cast_const().cast(), bytes) })
    };
    shared.message(header, body)
}

/// `ucp_send_nbx_callback_t` of a message.
pub(super) unsafe extern "C" fn sent(request: *mut c_void, status: Status, sending: *mut c_void) {
    // SAFETY: it is what `Shared::post` has handed over, and a request calls back once.
    let sending = unsafe { Box::from_raw(sending.cast::<Sending>()) };
    // SAFETY: the library's callbacks end before what they share does.
    let shared = unsafe { &*sending.shared };
    // SAFETY: the request is over, and nobody else has it.
    unsafe { (shared.ucx.c.ucp_request_free)(request) };
    shared.pending.fetch_sub(1, Ordering::Relaxed);
    let result = shared.result("ucp_am_send_nbx", status);
    let token = sending.token;
    shared.lock.tell(move || {
        drop(sending);
        shared.events.sent(token, result);
    });
}

/// `ucp_am_recv_data_nbx_callback_t`
unsafe extern "C" fn received(
    request: *mut c_void,
    status: Status,
    _bytes: usize,
    receiving: *mut c_void,
) {
    // SAFETY: it is what `Shared::receive` has handed over, and a request calls back once.
    let receiving = unsafe { Box::from_raw(receiving.cast::<Receiving>()) };
    // SAFETY: the library's callbacks end before what they share does.
    let shared = unsafe { &*receiving.shared };
    // SAFETY: the request is over, and nobody else has it.
    unsafe { (shared.ucx.c.ucp_request_free)(request) };
    shared.is_received(*receiving, status);
}

/// `ucp_send_nbx_callback_t` of an endpoint that was closed.
pub(super) unsafe extern "C" fn closed(request: *mut c_void, _status: Status, shared: *mut c_void) {
    // SAFETY: it is what `Shared::close` has handed over.
    let shared = unsafe { &*shared.cast_const().cast::<Shared>() };
    // SAFETY: the request is over, and nobody else has it.
    unsafe { (shared.ucx.c.ucp_request_free)(request) };
    shared.closing.fetch_sub(1, Ordering::Relaxed);
}

/// `ucp_err_handler_cb_t`
pub(super) unsafe extern "C" fn failed(shared: *mut c_void, endpoint: usize, status: Status) {
    // SAFETY: it is what `Shared::connect` has handed over.
    let shared = unsafe { &*shared.cast_const().cast::<Shared>() };
    let failure = shared.ucx.failure("connection", status);
    if let Some(endpoint) = shared.endpoints.fail(endpoint, &failure) {
        shared.lock.tell(|| shared.events.failed(endpoint, failure));
    }
}
