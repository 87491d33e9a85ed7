//! The structures of UCP that are used, as `ucp.h` of UCX 1.12 declares them.
//!
//! Every structure that the library reads by a mask of fields ends here with room for the fields of later versions, so that
//! a library that looks at one finds a zero. Handles are pointers, here as wide integers.

use std::ffi::{c_int, c_uint, c_void};

/// `ucs_status_t`: a packed enumeration, and so one byte.
pub(super) type Status = i8;

pub(super) const OK: Status = 0;
/// `UCS_INPROGRESS`
pub(super) const IN_PROGRESS: Status = 1;

/// `UCP_PARAM_FIELD_*`
pub(super) mod context_field {
    pub const FEATURES: u64 = 1 << 0;
    pub const MT_WORKERS_SHARED: u64 = 1 << 5;
    pub const NAME: u64 = 1 << 8;
}

/// `UCP_FEATURE_*`
pub(super) mod feature {
    pub const WAKEUP: u64 = 1 << 4;
    pub const AM: u64 = 1 << 6;
}

/// `UCP_WORKER_PARAM_FIELD_THREAD_MODE`
pub(super) const WORKER_THREAD_MODE: u64 = 1 << 0;

/// `UCP_WORKER_ATTR_FIELD_*`
pub(super) mod worker_field {
    pub const THREAD_MODE: u64 = 1 << 0;
    pub const MAX_AM_HEADER: u64 = 1 << 3;
}

/// `UCS_THREAD_MODE_SERIALIZED`: several threads, one at a time.
pub(super) const SERIALIZED: c_uint = 1;

/// `UCP_EP_PARAM_FIELD_*`
pub(super) mod endpoint_field {
    pub const REMOTE_ADDRESS: u64 = 1 << 0;
    pub const ERR_HANDLING_MODE: u64 = 1 << 1;
    pub const ERR_HANDLER: u64 = 1 << 2;
}

/// `UCP_ERR_HANDLING_MODE_PEER`
pub(super) const ERR_HANDLING_PEER: c_uint = 1;

/// `UCP_EP_CLOSE_FLAG_FORCE`
pub(super) const CLOSE_FORCE: u32 = 1 << 0;

/// `UCP_OP_ATTR_FIELD_*`
pub(super) mod operation {
    pub const CALLBACK: u32 = 1 << 1;
    pub const USER_DATA: u32 = 1 << 2;
    pub const FLAGS: u32 = 1 << 4;
}

/// `UCP_AM_HANDLER_PARAM_FIELD_*`
pub(super) mod handler_field {
    pub const ID: u64 = 1 << 0;
    pub const FLAGS: u64 = 1 << 1;
    pub const CB: u64 = 1 << 2;
    pub const ARG: u64 = 1 << 3;
}

/// `UCP_AM_FLAG_WHOLE_MSG`
pub(super) const WHOLE_MESSAGE: u32 = 1 << 0;

/// `UCP_AM_RECV_ATTR_FLAG_RNDV`
pub(super) const RENDEZVOUS: u64 = 1 << 17;

/// Room for the fields of later versions.
type Later = [u64; 16];

/// `ucp_params_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct ContextParams {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: usize,
    pub request_cleanup: usize,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: usize,
    pub later: Later,
}

/// `ucp_worker_params_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct WorkerParams {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [u64; 16],
    pub events: c_uint,
    pub user_data: usize,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: usize,
    pub am_alignment: usize,
    pub client_id: u64,
    pub later: Later,
}

/// `ucp_worker_attr_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct WorkerAttributes {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub address_flags: u32,
    pub address: usize,
    pub address_length: usize,
    pub max_am_header: usize,
    pub name: [u8; 32],
    pub max_debug_string: usize,
    pub later: Later,
}

/// `ucs_sock_addr_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct SocketAddress {
    pub address: usize,
    pub length: u32,
}

/// `ucp_err_handler_cb_t`
pub(super) type FailedCallback = unsafe extern "C" fn(*mut c_void, usize, Status);

/// `ucp_err_handler_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct ErrorHandler {
    pub callback: Option<FailedCallback>,
    pub argument: usize,
}

/// `ucp_ep_params_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct EndpointParams {
    pub field_mask: u64,
    pub address: usize,
    pub err_mode: c_uint,
    pub err_handler: ErrorHandler,
    pub user_data: usize,
    pub flags: c_uint,
    pub socket: SocketAddress,
    pub conn_request: usize,
    pub name: usize,
    pub local_socket: SocketAddress,
    pub later: Later,
}

/// `ucp_send_nbx_callback_t`
pub(super) type SentCallback = unsafe extern "C" fn(*mut c_void, Status, *mut c_void);
/// `ucp_am_recv_data_nbx_callback_t`
pub(super) type ReceivedCallback = unsafe extern "C" fn(*mut c_void, Status, usize, *mut c_void);

/// The union `cb` of `ucp_request_param_t`, of those that are used.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Callback {
    pub none: usize,
    pub sent: SentCallback,
    pub received: ReceivedCallback,
}

impl Default for Callback {
    fn default() -> Self {
        Self { none: 0 }
    }
}

/// `ucp_request_param_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct RequestParams {
    pub mask: u32,
    pub flags: u32,
    pub request: usize,
    pub callback: Callback,
    pub datatype: u64,
    pub user_data: usize,
    pub reply_buffer: usize,
    pub memory_type: c_uint,
    pub receive_info: usize,
    pub memory: usize,
    pub later: Later,
}

/// `ucp_am_recv_callback_t`
pub(super) type ArrivedCallback = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const ReceiveParams,
) -> Status;

/// `ucp_am_handler_param_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct HandlerParams {
    pub field_mask: u64,
    pub id: c_uint,
    pub flags: u32,
    pub callback: Option<ArrivedCallback>,
    pub argument: usize,
    pub later: Later,
}

/// `ucp_am_recv_param_t`; the library's, which is only read.
#[repr(C)]
pub(super) struct ReceiveParams {
    pub attributes: u64,
    pub reply_endpoint: usize,
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    const LATER: usize = size_of::<Later>();

    #[test]
    fn sizes_are_those_of_the_header() {
        // A C program printed them for 1.13.1; up to there, 1.12 and 1.20 have the same fields.
        assert_eq!(size_of::<Status>(), 1);
        assert_eq!(size_of::<ContextParams>(), 80 + LATER);
        assert_eq!(size_of::<WorkerParams>(), 200 + LATER);
        assert_eq!(size_of::<WorkerAttributes>(), 80 + LATER);
        assert_eq!(size_of::<EndpointParams>(), 104 + LATER);
        assert_eq!(size_of::<RequestParams>(), 72 + LATER);
        assert_eq!(size_of::<HandlerParams>(), 32 + LATER);
        assert_eq!(size_of::<ReceiveParams>(), 16);
        assert_eq!(size_of::<SocketAddress>(), 16);
        assert_eq!(align_of::<RequestParams>(), 8);
    }

    #[test]
    fn offsets_are_those_of_the_header() {
        assert_eq!(offset_of!(ContextParams, mt_workers_shared), 48);
        assert_eq!(offset_of!(ContextParams, estimated_num_eps), 56);
        assert_eq!(offset_of!(ContextParams, name), 72);
        assert_eq!(offset_of!(WorkerParams, thread_mode), 8);
        assert_eq!(offset_of!(WorkerParams, cpu_mask), 16);
        assert_eq!(offset_of!(WorkerParams, events), 144);
        assert_eq!(offset_of!(WorkerParams, event_fd), 160);
        assert_eq!(offset_of!(WorkerParams, client_id), 192);
        assert_eq!(offset_of!(WorkerAttributes, address_flags), 12);
        assert_eq!(offset_of!(WorkerAttributes, max_am_header), 32);
        assert_eq!(offset_of!(WorkerAttributes, max_debug_string), 72);
        assert_eq!(offset_of!(EndpointParams, err_mode), 16);
        assert_eq!(offset_of!(EndpointParams, err_handler), 24);
        assert_eq!(offset_of!(EndpointParams, flags), 48);
        assert_eq!(offset_of!(EndpointParams, socket), 56);
        assert_eq!(offset_of!(EndpointParams, local_socket), 88);
        assert_eq!(offset_of!(RequestParams, callback), 16);
        assert_eq!(offset_of!(RequestParams, datatype), 24);
        assert_eq!(offset_of!(RequestParams, user_data), 32);
        assert_eq!(offset_of!(RequestParams, memory_type), 48);
        assert_eq!(offset_of!(RequestParams, memory), 64);
        assert_eq!(offset_of!(HandlerParams, callback), 16);
        assert_eq!(offset_of!(ReceiveParams, reply_endpoint), 8);
    }
}
