//! The fake CUDA driver of `symmem-sys` as functions of C, as many as a process needs for communicators and memory of devices.
//!
//! For Python, which has no other driver: a link called `libcuda.so.1` to this file, found by `LD_LIBRARY_PATH`. The
//! number of devices is in `SYMMEM_FAKE_CUDA_DEVICES`, 0 without. Kernels can be loaded and not launched.
#![allow(unsafe_code)] // pointers of the caller's, as the driver takes them

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use symmem_sys::cuda::fake::Fake;
use symmem_sys::cuda::{
    Access, Attribute, Capture, CaptureMode, Context, Device, Devices, Event, Failure, Granularity,
    HandleType, Kernels, Memory, MemoryProperties, Module, Result, Stream, Streams, VirtualMemory,
    code,
};

static FAKE: LazyLock<Arc<Fake>> = LazyLock::new(|| {
    let set = std::env::var("SYMMEM_FAKE_CUDA_DEVICES").ok();
    let fake = Fake::plain(set.and_then(|number| number.parse().ok()).unwrap_or(0));
    fake.adopt(HEAPS.0, HEAPS.1);
    fake
});

/// Where the fake NVSHMEM maps its heaps, and how many bytes these are: `BASE`, `PES` and `HEAP` of that crate.
const HEAPS: (u64, u64) = (0x2e00_0000_0000, 17 * (64 << 20));

static BUSY: AtomicU64 = AtomicU64::new(0);

/// What is asked of devices before memory is allocated there; the rest is 0.
const ATTRIBUTES: [Attribute; 7] = [
    Attribute::SmCount,
    Attribute::L2Bytes,
    Attribute::ComputeMajor,
    Attribute::ComputeMinor,
    Attribute::VirtualMemory,
    Attribute::FdHandles,
    Attribute::FabricHandles,
];

/// The device whose context is current.
pub(crate) fn current() -> Option<c_int> {
    FAKE.context_device().ok().map(|device| device.0)
}

/// Memory of the current device, if there is one.
pub(crate) fn allocate(bytes: usize) -> Option<u64> {
    FAKE.allocate(bytes).ok()
}

/// Whether it was such memory, which is gone then.
pub(crate) fn free(address: u64) -> bool {
    // SAFETY: the caller does not use it again.
    unsafe { FAKE.free(address) }.is_ok()
}

/// Has memory of this process be a device's, for who asks.
#[unsafe(no_mangle)]
pub extern "C" fn fakeCudaPlace(address: u64, bytes: usize, device: c_int) {
    FAKE.adopt_for(Device(device), address, bytes as u64);
}

/// How often a stream was waited for.
#[unsafe(no_mangle)]
pub extern "C" fn fakeCudaStreamWaits() -> c_int {
    FAKE.calls("cuStreamSynchronize") as c_int
}

/// Has every wait for a whole device take so many milliseconds.
#[unsafe(no_mangle)]
pub extern "C" fn fakeCudaBusy(milliseconds: c_int) {
    BUSY.store(u64::try_from(milliseconds).unwrap_or(0), Ordering::Relaxed);
}

/// Writes through a pointer of the caller's.
unsafe fn put<T>(to: *mut T, value: T) -> Result<()> {
    let to = NonNull::new(to).ok_or_else(|| Failure::new("", code::INVALID_VALUE, "null"))?;
    // SAFETY: the caller gives a pointer to write through.
    unsafe { to.write(value) };
    Ok(())
}

fn ready(call: &'static str, is_ready: bool) -> Result<()> {
    if is_ready { Ok(()) } else { Err(Failure::new(call, code::NOT_READY, "")) }
}

/// A stream. One that the driver did not make is one of a test, and is taken for the default stream.
fn stream(raw: usize) -> Stream {
    // SAFETY: the fake looks every handle up.
    let stream = unsafe { Stream::from_raw(raw) };
    if FAKE.stream_context(stream).is_ok() { stream } else { Stream::DEFAULT }
}

/// What `CUmemAllocationProp` says, of which only the ints are wanted: kind, handles, kind of the place, device.
unsafe fn properties(from: *const [c_int; 4]) -> MemoryProperties {
    // SAFETY: the caller gives such a structure.
    let [_, handles, _, device] = unsafe { from.read() };
    let handle = if handles & 1 == 1 { HandleType::Fd } else { HandleType::None };
    MemoryProperties { device: Device(device), handle, rdma: false }
}

macro_rules! exports {
    ($($name:ident($($argument:ident: $type:ty),*) => $body:expr;)*) => {$(
        #[allow(unused_unsafe, reason = "some functions take no pointers")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            // SAFETY: the caller keeps to the rules of the driver's function.
            let run = || -> Result<()> { unsafe { $body } };
            run().err().map_or(0, |failure| failure.code)
        }
    )*};
}

exports! {
    cuInit(_flags: c_uint) => FAKE.init();
    cuDriverGetVersion(version: *mut c_int) => put(version, FAKE.version()?);
    cuDeviceGetCount(count: *mut c_int) => put(count, FAKE.device_count()? as c_int);
    cuDeviceGet(device: *mut c_int, ordinal: c_int) => {
        put(device, FAKE.device(usize::try_from(ordinal).unwrap_or(usize::MAX))?.0)
    };
    cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int) => {
        match ATTRIBUTES.into_iter().find(|known| *known as c_int == which) {
            Some(known) => put(value, FAKE.attribute(known, Device(device))?),
            None => put(value, 0),
        }
    };
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) => {
        put(uuid, FAKE.device_uuid(Device(device))?)
    };
    cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) => {
        put(context, FAKE.context_retain(Device(device))?.raw())
    };
    cuDevicePrimaryCtxRelease_v2(device: c_int) => FAKE.context_release(Device(device));
    cuCtxGetCurrent(context: *mut usize) => {
        put(context, FAKE.context_current()?.map_or(0, Context::raw))
    };
    cuCtxSetCurrent(context: usize) => {
        FAKE.context_set((context != 0).then(|| Context::from_raw(context)))
    };
    cuCtxPushCurrent_v2(context: usize) => FAKE.context_push(Context::from_raw(context));
    cuCtxPopCurrent_v2(context: *mut usize) => put(context, FAKE.context_pop()?.raw());
    cuCtxGetDevice(device: *mut c_int) => put(device, FAKE.context_device()?.0);
    cuCtxSynchronize() => {
        std::thread::sleep(Duration::from_millis(BUSY.load(Ordering::Relaxed)));
        FAKE.context_synchronize()
    };
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => {
        let info = FAKE.memory_info()?;
        put(free, info.free)?;
        put(total, info.total)
    };

    cuMemGetAllocationGranularity(to: *mut usize, from: *const [c_int; 4], _option: c_int) => {
        put(to, FAKE.granularity(&properties(from), Granularity::Recommended)?)
    };
    cuMemCreate(memory: *mut u64, bytes: usize, from: *const [c_int; 4], _flags: u64) => {
        put(memory, FAKE.create(bytes, &properties(from))?.raw())
    };
    cuMemRelease(memory: u64) => FAKE.release(Memory::from_raw(memory));
    cuMemRetainAllocationHandle(memory: *mut u64, address: u64) => {
        put(memory, FAKE.retain(address)?.raw())
    };
    cuMemExportToShareableHandle(to: *mut c_int, memory: u64, _kind: c_int, _flags: u64) => {
        put(to, FAKE.export_fd(Memory::from_raw(memory))?.into_raw_fd())
    };
    cuMemImportFromShareableHandle(memory: *mut u64, descriptor: usize, _kind: c_int) => {
        put(memory, FAKE.import_fd(BorrowedFd::borrow_raw(descriptor as c_int))?.raw())
    };
    cuMemAddressReserve(to: *mut u64, bytes: usize, alignment: usize, _hint: u64, _flags: u64) => {
        put(to, FAKE.reserve(bytes, alignment)?)
    };
    cuMemAddressFree(address: u64, bytes: usize) => FAKE.free_address(address, bytes);
    cuMemMap(address: u64, bytes: usize, offset: usize, memory: u64, _flags: u64) => {
        FAKE.map(address, bytes, offset, Memory::from_raw(memory))
    };
    cuMemUnmap(address: u64, bytes: usize) => FAKE.unmap(address, bytes);
    cuMemSetAccess(address: u64, bytes: usize, list: *const [c_int; 3], count: usize) => {
        let list = std::slice::from_raw_parts(list, count); // kind of the place, device, access
        let devices: Vec<Device> = list.iter().map(|[_, device, _]| Device(*device)).collect();
        FAKE.set_access(address, bytes, &devices, Access::ReadWrite)
    };
    cuMemHostAlloc(host: *mut *mut u8, bytes: usize, _flags: c_uint) => {
        put(host, FAKE.host_alloc(bytes)?.host.as_ptr())
    };
    cuMemHostGetDevicePointer_v2(address: *mut u64, host: *mut c_void, _flags: c_uint) => {
        put(address, host.expose_provenance() as u64)
    };
    cuMemFreeHost(host: *mut u8) => NonNull::new(host).map_or(Ok(()), |host| FAKE.host_free(host));
    cuPointerGetAttribute(value: *mut c_void, which: c_int, address: u64) => {
        let known = FAKE.pointer_info(address)?;
        match which {
            2 => put(value.cast(), if known.host { 1_u32 } else { 2 }),
            9 => put(value.cast(), known.device.0),
            11 => put(value.cast(), known.base),
            12 => put(value.cast(), known.bytes),
            _ => Err(Failure::new("cuPointerGetAttribute", code::INVALID_VALUE, "")),
        }
    };

    cuMemsetD8Async(to: u64, value: u8, bytes: usize, on: usize) => {
        FAKE.memset8(to, value, bytes, stream(on))
    };
    cuMemsetD32Async(to: u64, value: u32, count: usize, on: usize) => {
        FAKE.memset32(to, value, count, stream(on))
    };
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, on: usize) => {
        FAKE.copy_to_device(to, from, bytes, stream(on))
    };
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, on: usize) => {
        FAKE.copy_to_host(to, from, bytes, stream(on))
    };
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, on: usize) => {
        FAKE.copy(to, from, bytes, stream(on))
    };

    cuStreamCreate(made: *mut usize, _flags: c_uint) => put(made, FAKE.stream_create()?.raw());
    cuStreamDestroy_v2(on: usize) => FAKE.stream_destroy(stream(on));
    cuStreamQuery(on: usize) => ready("cuStreamQuery", FAKE.stream_query(stream(on))?);
    cuStreamSynchronize(on: usize) => FAKE.stream_synchronize(stream(on));
    cuStreamGetCaptureInfo_v2(
        on: usize, status: *mut c_int, id: *mut u64, _graph: *mut usize,
        _dependencies: *mut *const usize, _count: *mut usize
    ) => match FAKE.stream_capture(stream(on))? {
        Capture::None => put(status, 0),
        Capture::Active(number) => put(status, 1).and_then(|()| put(id, number)),
        Capture::Invalidated => put(status, 2),
    };
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int) => {
        let all = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        let wanted = all.into_iter().find(|known| *known as c_int == *mode).unwrap_or_default();
        put(mode, FAKE.capture_mode(wanted)? as c_int)
    };
    cuStreamWaitEvent(on: usize, event: usize, _flags: c_uint) => {
        FAKE.stream_wait(stream(on), Event::from_raw(event))
    };
    cuEventCreate(event: *mut usize, flags: c_uint) => {
        put(event, FAKE.event_create(flags & 2 == 0)?.raw())
    };
    cuEventDestroy_v2(event: usize) => FAKE.event_destroy(Event::from_raw(event));
    cuEventRecord(event: usize, on: usize) => FAKE.event_record(Event::from_raw(event), stream(on));
    cuEventQuery(event: usize) => {
        ready("cuEventQuery", FAKE.event_query(Event::from_raw(event))?)
    };
    cuEventSynchronize(event: usize) => FAKE.event_synchronize(Event::from_raw(event));

    cuModuleLoadDataEx(
        module: *mut usize, image: *const c_char, _count: c_uint, _options: *mut c_int,
        _values: *mut *mut c_void
    ) => put(module, FAKE.module_load(&CStr::from_ptr(image).to_string_lossy())?.raw());
    cuModuleUnload(module: usize) => FAKE.module_unload(Module::from_raw(module));
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) => {
        let name = CStr::from_ptr(name).to_string_lossy();
        put(function, FAKE.module_function(Module::from_raw(module), &name)?.raw())
    };
}
