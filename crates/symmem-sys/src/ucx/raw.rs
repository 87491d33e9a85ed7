//! The table of UCP's functions.
#![allow(unsafe_code)] // S4

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::types::{
    ContextParams, EndpointParams, HandlerParams, RequestParams, Status, WorkerAttributes,
    WorkerParams,
};
use crate::Loaded;

/// A struct with one pointer for each function. All of them are in every version that is used, so a library that lacks one
/// is none of ours.
macro_rules! functions {
    ($(#[$doc:meta])* struct $table:ident;
     $($name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $answer:ty)?;)*) => {
        $(#[$doc])*
        pub(super) struct $table {
            $(pub $name: unsafe extern "C" fn($($argument: $type),*) $(-> $answer)?,)*
        }

        impl $table {
            /// Looks up every function, or names the first that is not there.
            pub(super) fn new(library: &Loaded) -> Result<Self, &'static str> {
                $(
                    // SAFETY: the line of the table was copied from the library's public header.
                    let $name = unsafe { library.function(stringify!($name)) };
                )*
                Ok(Self { $($name: $name.ok_or(stringify!($name))?,)* })
            }
        }
    };
}

functions! {
    /// The library's functions, from `ucp.h`, and one of `libucs` below it.
    struct Functions;
    ucp_get_version(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint);
    ucp_config_read(prefix: *const c_char, file: *const c_char, config: *mut usize) -> Status;
    ucp_config_modify(config: usize, name: *const c_char, value: *const c_char) -> Status;
    ucp_config_release(config: usize);
    ucp_init_version(
        major: c_uint, minor: c_uint, params: *const ContextParams, config: usize,
        context: *mut usize) -> Status;
    ucp_cleanup(context: usize);
    ucp_worker_create(context: usize, params: *const WorkerParams, worker: *mut usize) -> Status;
    ucp_worker_destroy(worker: usize);
    ucp_worker_query(worker: usize, attributes: *mut WorkerAttributes) -> Status;
    ucp_worker_get_address(worker: usize, address: *mut *mut u8, bytes: *mut usize) -> Status;
    ucp_worker_release_address(worker: usize, address: *mut u8);
    ucp_worker_progress(worker: usize) -> c_uint;
    ucp_worker_get_efd(worker: usize, descriptor: *mut c_int) -> Status;
    ucp_worker_arm(worker: usize) -> Status;
    ucp_worker_signal(worker: usize) -> Status;
    ucp_worker_set_am_recv_handler(worker: usize, params: *const HandlerParams) -> Status;
    ucp_ep_create(worker: usize, params: *const EndpointParams, endpoint: *mut usize) -> Status;
    ucp_ep_close_nbx(endpoint: usize, params: *const RequestParams) -> isize;
    ucp_am_send_nbx(
        endpoint: usize, id: c_uint, header: *const c_void, header_bytes: usize,
        body: *const c_void, count: usize, params: *const RequestParams) -> isize;
    ucp_am_recv_data_nbx(
        worker: usize, descriptor: *mut c_void, place: *mut c_void, count: usize,
        params: *const RequestParams) -> isize;
    ucp_request_free(request: *mut c_void);
    ucs_status_string(status: Status) -> *const c_char;
}

/// What `ucs_status_ptr_t` says of an operation that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// It is over, and its callback is not called.
    Done,
    /// It goes on, and its callback is called.
    Pending,
    /// It was not begun.
    Failed(Status),
}

impl Asked {
    pub(super) fn from(pointer: isize) -> Self {
        // Errors are the last hundred addresses.
        match Status::try_from(pointer) {
            Ok(0) => Self::Done,
            Ok(status) if (-100..0).contains(&status) => Self::Failed(status),
            _ => Self::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_of_a_status_is_nothing_an_error_or_a_request() {
        assert_eq!(Asked::from(0), Asked::Done);
        assert_eq!(Asked::from(-25), Asked::Failed(-25));
        assert_eq!(Asked::from(-100), Asked::Failed(-100));
        assert_eq!(Asked::from(-101), Asked::Pending);
        assert_eq!(Asked::from(0x7f00_1234_5678), Asked::Pending);
    }

    #[test]
    fn a_library_without_the_functions_is_told_the_first() {
        let missing = Functions::new(&Loaded::without_functions()).err();
        assert_eq!(missing, Some("ucp_get_version"));
    }
}
