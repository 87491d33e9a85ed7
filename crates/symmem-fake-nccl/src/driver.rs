//! Just enough of a CUDA driver for communicators and for memory of one rank: devices, contexts, and streams in which nothing
//! ever is. Memory is in [`device`](crate::device).
//!
//! For Python, which has no other fake driver: a link called `libcuda.so.1` to this file, found by `LD_LIBRARY_PATH`. The
//! number of devices is in `SYMMEM_FAKE_CUDA_DEVICES`, 0 without.
#![allow(unsafe_code)] // pointers of the caller's, as the driver takes them

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const INVALID_VALUE: c_int = 1;
const INVALID_CONTEXT: c_int = 201;

thread_local! {
    /// The contexts of this thread; the last is current.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Which device memory belongs to, by the address: bytes and device.
static PLACES: Mutex<BTreeMap<u64, (usize, c_int)>> = Mutex::new(BTreeMap::new());

const FIRST_CONTEXT: usize = 0x100;

static STREAM_WAITS: AtomicI32 = AtomicI32::new(0);
static BUSY: AtomicI32 = AtomicI32::new(0);

/// The device whose context is current.
pub(crate) fn current() -> Option<c_int> {
    let last = CONTEXTS.with_borrow(|contexts| contexts.last().copied())?;
    last.checked_sub(FIRST_CONTEXT).and_then(|device| c_int::try_from(device).ok())
}

fn devices() -> c_int {
    let set = std::env::var("SYMMEM_FAKE_CUDA_DEVICES").ok();
    set.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Writes through a pointer of the caller's.
pub(crate) fn put<T>(to: *mut T, value: T) -> c_int {
    if to.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller gives a pointer to write through.
    unsafe { to.write(value) };
    SUCCESS
}

/// Has memory of this process be a device's, for who asks.
#[unsafe(no_mangle)]
pub extern "C" fn fakeCudaPlace(address: u64, bytes: usize, device: c_int) {
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    places.insert(address, (bytes, device));
}

/// It is no device's any more.
pub(crate) fn forget(address: u64) {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    put(version, 13000)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    put(count, devices())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    if (0..devices()).contains(&ordinal) { put(device, ordinal) } else { 101 }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, _device: c_int) -> c_int {
    let answer = match which {
        16 => 8,        // multiprocessors
        38 => 1 << 20,  // cache
        75 => 9,        // compute capability
        102 | 103 => 1, // virtual memory, descriptors
        _ => 0,
    };
    put(value, answer)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&device.to_ne_bytes());
    put(uuid, bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> c_int {
    put(context, FIRST_CONTEXT + usize::try_from(device).unwrap_or(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: *mut usize) -> c_int {
    put(context, CONTEXTS.with_borrow(|contexts| contexts.last().copied()).unwrap_or(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    CONTEXTS.with_borrow_mut(|contexts| {
        contexts.pop();
        contexts.extend((context != 0).then_some(context));
    });
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> c_int {
    match CONTEXTS.with_borrow_mut(Vec::pop) {
        Some(popped) => put(context, popped),
        None => INVALID_CONTEXT,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_int {
    current().map_or(INVALID_CONTEXT, |current| put(device, current))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: *mut usize, _flags: c_uint) -> c_int {
    put(stream, 0x500)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(_stream: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(_stream: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(_stream: usize) -> c_int {
    STREAM_WAITS.fetch_add(1, Ordering::Relaxed);
    SUCCESS
}

/// How often a stream was waited for.
#[unsafe(no_mangle)]
pub extern "C" fn fakeCudaStreamWaits() -> c_int {
    STREAM_WAITS.load(Ordering::Relaxed)
}

/// Has every wait for a whole device take so many milliseconds.
#[unsafe(no_mangle)]
pub extern "C" fn fakeCudaBusy(milliseconds: c_int) {
    BUSY.store(milliseconds, Ordering::Relaxed);
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    let busy = u64::try_from(BUSY.load(Ordering::Relaxed)).unwrap_or(0);
    std::thread::sleep(Duration::from_millis(busy));
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCaptureInfo_v2(
    _stream: usize,
    status: *mut c_int,
    _id: *mut u64,
    _graph: *mut usize,
    _dependencies: *mut *const usize,
    _count: *mut usize,
) -> c_int {
    put(status, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(_mode: *mut c_int) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(value: *mut c_void, which: c_int, address: u64) -> c_int {
    let places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let place = places.range(..=address).next_back();
    match place.filter(|(start, (bytes, _))| address < **start + *bytes as u64) {
        None => INVALID_VALUE,
        Some((start, (bytes, device))) => match which {
            2 => put(value.cast(), 2_u32), // on a device
            9 => put(value.cast(), *device),
            11 => put(value.cast(), *start),
            12 => put(value.cast(), *bytes),
            _ => INVALID_VALUE,
        },
    }
}
