//! Memory of "devices" for [`driver`](crate::driver): memory of this process, for worlds of one rank.
//!
//! An allocation has its bytes where it is mapped, at once and only there. What is put into a stream is done at once; kernels
//! are launched in vain.
#![allow(unsafe_code)] // pointers of the caller's, as the driver takes them

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{INVALID_VALUE, SUCCESS, current, fakeCudaPlace, forget, put};

/// What sizes and addresses are multiples of.
const GRANULE: usize = 1 << 16;
/// What the devices have.
const BYTES: usize = 1 << 30;

static LAST: AtomicU64 = AtomicU64::new(0x1000);

/// A handle that is no other's.
fn handle() -> u64 {
    LAST.fetch_add(1, Ordering::Relaxed)
}

fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, GRANULE).ok().filter(|layout| layout.size() > 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    put(total, BYTES);
    put(free, BYTES)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    _properties: *const c_void,
    _option: c_int,
) -> c_int {
    put(granularity, GRANULE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemCreate(
    memory: *mut u64,
    _bytes: usize,
    _properties: *const c_void,
    _flags: u64,
) -> c_int {
    put(memory, handle())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(_memory: u64) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRetainAllocationHandle(memory: *mut u64, _address: u64) -> c_int {
    put(memory, handle())
}

/// A descriptor, which leads to nothing.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemExportToShareableHandle(
    shareable: *mut c_void,
    _memory: u64,
    _kind: c_int,
    _flags: u64,
) -> c_int {
    match std::fs::File::open("/dev/null") {
        Ok(file) => put(shareable.cast(), file.into_raw_fd()),
        Err(_) => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    bytes: usize,
    _alignment: usize,
    _hint: u64,
    _flags: u64,
) -> c_int {
    let Some(layout) = layout(bytes) else { return INVALID_VALUE };
    // SAFETY: the layout has a size.
    let made = unsafe { alloc_zeroed(layout) }.expose_provenance() as u64;
    fakeCudaPlace(made, bytes, current().unwrap_or(0));
    put(address, made)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(address: u64, bytes: usize) -> c_int {
    let Some(layout) = layout(bytes) else { return INVALID_VALUE };
    forget(address);
    // SAFETY: reserved so, and the caller does not use it again.
    unsafe { dealloc(pointer(address), layout) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(_at: u64, _bytes: usize, _offset: usize, _m: u64, _f: u64) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(_address: u64, _bytes: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(
    _address: u64,
    _bytes: usize,
    _descriptions: *const c_void,
    _count: usize,
) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
    let mut address = 0;
    let made = cuMemAddressReserve(&mut address, bytes.next_multiple_of(GRANULE), 0, 0, 0);
    if made == SUCCESS { put(host, pointer(address)) } else { made }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetDevicePointer_v2(
    address: *mut u64,
    host: *mut c_void,
    _flags: c_uint,
) -> c_int {
    put(address, host.expose_provenance() as u64)
}

/// Left where it is: a test's process ends soon.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(_host: *mut c_void) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, _stream: usize) -> c_int {
    // SAFETY: the caller gives so many bytes of memory of this process.
    unsafe { pointer::<u8>(to).write_bytes(value, bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(to: u64, value: u32, count: usize, _stream: usize) -> c_int {
    for i in 0..count {
        // SAFETY: the caller gives so many words of memory of this process.
        unsafe { pointer::<u32>(to).wrapping_add(i).write(value) };
    }
    SUCCESS
}

fn copy(from: *const u8, to: *mut u8, bytes: usize) -> c_int {
    // SAFETY: the caller gives so many bytes of memory of this process in both places.
    unsafe { from.copy_to(to, bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, n: usize, _s: usize) -> c_int {
    copy(from.cast(), pointer(to), n)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, n: usize, _s: usize) -> c_int {
    copy(pointer(from), to.cast(), n)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: usize) -> c_int {
    copy(pointer(from), pointer(to), bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> c_int {
    put(event, handle() as usize)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(_event: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(_event: usize, _stream: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(_event: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(_event: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(_stream: usize, _event: usize, _flags: c_uint) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadDataEx(
    module: *mut usize,
    _image: *const c_char,
    _count: c_uint,
    _options: *mut c_int,
    _values: *mut *mut c_void,
) -> c_int {
    put(module, handle() as usize)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(_module: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(
    function: *mut usize,
    _module: usize,
    _name: *const c_char,
) -> c_int {
    put(function, handle() as usize)
}
