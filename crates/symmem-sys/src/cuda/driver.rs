//! What the library needs of the CUDA driver, as traits that the real and the fake driver implement.
//!
//! Everybody uses [`Driver`], which has the methods of the four others: no import is needed to call them on a
//! `dyn Driver`. The first line of each method names the C function.
//!
//! Handles are live until they are destroyed, and destroying is unsafe: the caller vouches that nobody uses the
//! handle afterwards. Methods on addresses are unsafe, but for those that only ask about one.
#![allow(unsafe_code)] // S4

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use super::types::{
    Access, Attribute, Capture, CaptureMode, Compare, Context, Device, Event, FabricHandle,
    Function, FunctionAttribute, Granularity, Graph, GraphExec, HostMemory, Launch, MemOp, Memory,
    MemoryInfo, MemoryProperties, Module, MulticastProperties, P2pAttribute, PointerInfo, Stream,
};
use super::{Failure, Result};

/// Everything that the library needs of the CUDA driver.
pub trait Driver: Devices + VirtualMemory + Streams + Kernels + Send + Sync {}

impl<T: Devices + VirtualMemory + Streams + Kernels + Send + Sync> Driver for T {}

/// Devices and contexts.
pub trait Devices {
    /// `cuInit`: before anything else but [`version`](Self::version). A process that has called it should not fork.
    fn init(&self) -> Result<()>;

    /// `cuDriverGetVersion`: the CUDA version that the driver supports, 12040 for 12.4.
    fn version(&self) -> Result<i32>;

    /// `cuDeviceGetCount`: devices that this process sees.
    fn device_count(&self) -> Result<usize>;

    /// `cuDeviceGet`: the device of this number.
    fn device(&self, ordinal: usize) -> Result<Device>;

    /// `cuDeviceGetName`: such as `NVIDIA H200`.
    fn device_name(&self, device: Device) -> Result<String>;

    /// `cuDeviceGetUuid`: which device it is, for all processes alike.
    fn device_uuid(&self, device: Device) -> Result<[u8; 16]>;

    /// `cuDeviceGetPCIBusId`: such as `0000:8d:00.0`, in lower case as the kernel writes it.
    fn pci_bus_id(&self, device: Device) -> Result<String>;

    /// `cuDeviceTotalMem`: bytes of memory.
    fn total_memory(&self, device: Device) -> Result<usize>;

    /// `cuDeviceGetAttribute`: a number, or 1 for yes.
    fn attribute(&self, attribute: Attribute, device: Device) -> Result<i32>;

    /// Whether the device has what can be answered by yes or no; a driver that does not know the question means no.
    fn has(&self, attribute: Attribute, device: Device) -> bool {
        self.attribute(attribute, device).is_ok_and(|answer| answer == 1)
    }

    /// `cuDeviceCanAccessPeer`: whether `device` can load from and store to memory of `peer`.
    fn can_access_peer(&self, device: Device, peer: Device) -> Result<bool>;

    /// `cuDeviceGetP2PAttribute`: about the link from `device` to `peer`.
    fn p2p_attribute(&self, which: P2pAttribute, device: Device, peer: Device) -> Result<i32>;

    /// `cuDevicePrimaryCtxRetain`: the context that all libraries of a process share; made by the first who asks.
    fn context_retain(&self, device: Device) -> Result<Context>;

    /// `cuDevicePrimaryCtxRelease`: once for each retain.
    ///
    /// # Safety
    ///
    /// A caller that has released it as often as retained uses nothing of that context any more.
    unsafe fn context_release(&self, device: Device) -> Result<()>;

    /// `cuCtxSetCurrent`: for this thread; `None` takes the current one away.
    fn context_set(&self, context: Option<Context>) -> Result<()>;

    /// `cuCtxGetCurrent`: of this thread.
    fn context_current(&self) -> Result<Option<Context>>;

    /// `cuCtxPushCurrent`: current for this thread until it is popped.
    fn context_push(&self, context: Context) -> Result<()>;

    /// `cuCtxPopCurrent`: what was pushed last.
    fn context_pop(&self) -> Result<Context>;

    /// `cuCtxGetDevice`: the device of the current context.
    fn context_device(&self) -> Result<Device>;

    /// `cuCtxSynchronize`: waits for all work in the current context.
    fn context_synchronize(&self) -> Result<()>;

    /// `cuMemGetInfo`: memory of the current context's device.
    fn memory_info(&self) -> Result<MemoryInfo>;
}

/// Physical memory, addresses, and mappings of the one at the other. None of this needs a current context but
/// [`host_alloc`](Self::host_alloc).
pub trait VirtualMemory {
    /// `cuMemGetAllocationGranularity`: what sizes and addresses must be multiples of.
    fn granularity(&self, properties: &MemoryProperties, which: Granularity) -> Result<usize>;

    /// `cuMemCreate`: physical memory. Its contents are whatever they were.
    fn create(&self, bytes: usize, properties: &MemoryProperties) -> Result<Memory>;

    /// `cuMemRelease`: once for each create, import and retain. Mappings keep the memory itself.
    ///
    /// # Safety
    ///
    /// The handle is not used again.
    unsafe fn release(&self, memory: Memory) -> Result<()>;

    /// `cuMemAddressReserve`: addresses without memory.
    fn reserve(&self, bytes: usize, alignment: usize) -> Result<u64>;

    /// `cuMemAddressFree`: all of what one reserve gave, with nothing mapped there.
    ///
    /// # Safety
    ///
    /// The addresses are the caller's and are not used again.
    unsafe fn free_address(&self, address: u64, bytes: usize) -> Result<()>;

    /// `cuMemMap`: `bytes` of `memory` from `offset` at `address`. Nobody has access yet.
    ///
    /// # Safety
    ///
    /// The addresses are the caller's reservation.
    unsafe fn map(&self, address: u64, bytes: usize, offset: usize, memory: Memory) -> Result<()>;

    /// `cuMemUnmap`: whole mappings only.
    ///
    /// # Safety
    ///
    /// The mapping is the caller's, and nobody uses it any more, neither kernels nor copies in a stream.
    unsafe fn unmap(&self, address: u64, bytes: usize) -> Result<()>;

    /// `cuMemSetAccess`: what each of `devices` may do there.
    ///
    /// # Safety
    ///
    /// The mapping is the caller's, and nobody uses what is taken away.
    unsafe fn set_access(
        &self,
        address: u64,
        bytes: usize,
        devices: &[Device],
        access: Access,
    ) -> Result<()>;

    /// `cuMemExportToShareableHandle`: a descriptor that keeps the memory, or multicast object, alive for its holder.
    fn export_fd(&self, memory: Memory) -> Result<OwnedFd>;

    /// `cuMemImportFromShareableHandle`: what was exported, here or in another process. The descriptor can be closed
    /// afterwards.
    fn import_fd(&self, fd: BorrowedFd<'_>) -> Result<Memory>;

    /// `cuMemExportToShareableHandle`: 64 bytes that lead to the memory while its owner lives.
    fn export_fabric(&self, memory: Memory) -> Result<FabricHandle>;

    /// `cuMemImportFromShareableHandle`: what was exported, here or on another machine of the fabric.
    fn import_fabric(&self, handle: &FabricHandle) -> Result<Memory>;

    /// `cuMemRetainAllocationHandle`: the memory that is mapped at an address; to be released.
    fn retain(&self, address: u64) -> Result<Memory>;

    /// `cuPointerGetAttribute`: what the driver knows of an address.
    fn pointer_info(&self, address: u64) -> Result<PointerInfo>;

    /// `cuMulticastGetGranularity`: what sizes and offsets must be multiples of.
    fn multicast_granularity(
        &self,
        properties: &MulticastProperties,
        which: Granularity,
    ) -> Result<usize>;

    /// `cuMulticastCreate`: an object that is exported, mapped and released as memory is.
    fn multicast_create(&self, properties: &MulticastProperties) -> Result<Memory>;

    /// `cuMulticastAddDevice`: every device, before anybody binds memory.
    fn multicast_add(&self, multicast: Memory, device: Device) -> Result<()>;

    /// `cuMulticastBindMem`: `memory` from `memory_offset` becomes its device's part at `offset`.
    ///
    /// # Safety
    ///
    /// Stores to the multicast address will reach that memory: both are the caller's.
    unsafe fn multicast_bind(
        &self,
        multicast: Memory,
        offset: usize,
        memory: Memory,
        memory_offset: usize,
        bytes: usize,
    ) -> Result<()>;

    /// `cuMulticastUnbind`: whole bindings of a device only.
    ///
    /// # Safety
    ///
    /// Nobody uses the multicast address any more.
    unsafe fn multicast_unbind(
        &self,
        multicast: Memory,
        device: Device,
        offset: usize,
        bytes: usize,
    ) -> Result<()>;

    /// `cuMemHostAlloc`, `cuMemHostGetDevicePointer`: pinned memory of the host that all devices reach. Not zeroed.
    /// In the current context.
    fn host_alloc(&self, bytes: usize) -> Result<HostMemory>;

    /// `cuMemFreeHost`
    ///
    /// # Safety
    ///
    /// It came from [`host_alloc`](Self::host_alloc), and nobody uses it any more.
    unsafe fn host_free(&self, host: NonNull<u8>) -> Result<()>;
}

/// Streams, events, copies, and capture into graphs.
///
/// What is put into a stream happens later, so that the caller of an unsafe method vouches for its memory until then.
pub trait Streams {
    /// `cuStreamCreate`: one that does not wait for the default stream, in the current context.
    fn stream_create(&self) -> Result<Stream>;

    /// `cuStreamDestroy`: what is in it is still done.
    ///
    /// # Safety
    ///
    /// The handle is not used again.
    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()>;

    /// `cuStreamSynchronize`: waits until it is empty.
    fn stream_synchronize(&self, stream: Stream) -> Result<()>;

    /// `cuStreamQuery`: whether it is empty.
    fn stream_query(&self, stream: Stream) -> Result<bool>;

    /// `cuStreamGetCtx`: the context it belongs to.
    fn stream_context(&self, stream: Stream) -> Result<Context>;

    /// `cuStreamGetCaptureInfo`: whether it is being captured.
    fn stream_capture(&self, stream: Stream) -> Result<Capture>;

    /// `cuStreamWaitEvent`: what comes later in the stream waits for the event.
    fn stream_wait(&self, stream: Stream, event: Event) -> Result<()>;

    /// `cuEventCreate`: in the current context; without `timing` it is cheaper.
    fn event_create(&self, timing: bool) -> Result<Event>;

    /// `cuEventDestroy`
    ///
    /// # Safety
    ///
    /// The handle is not used again.
    unsafe fn event_destroy(&self, event: Event) -> Result<()>;

    /// `cuEventRecord`: the event is the stream's end as of now.
    fn event_record(&self, event: Event, stream: Stream) -> Result<()>;

    /// `cuEventSynchronize`: waits for it.
    fn event_synchronize(&self, event: Event) -> Result<()>;

    /// `cuEventQuery`: whether it has happened.
    fn event_query(&self, event: Event) -> Result<bool>;

    /// `cuEventElapsedTime`: milliseconds between two events with timing.
    fn event_elapsed(&self, start: Event, end: Event) -> Result<f32>;

    /// `cuMemsetD8Async`
    ///
    /// # Safety
    ///
    /// The `bytes` are mapped, and may be written then.
    unsafe fn memset8(&self, address: u64, value: u8, bytes: usize, stream: Stream) -> Result<()>;

    /// `cuMemsetD32Async`: `count` words.
    ///
    /// # Safety
    ///
    /// The words are mapped, and may be written then.
    unsafe fn memset32(&self, address: u64, value: u32, count: usize, stream: Stream)
    -> Result<()>;

    /// `cuMemcpyHtoDAsync`: from the host to a device.
    ///
    /// # Safety
    ///
    /// Source and destination are as long as `bytes`, and may be read and written then.
    unsafe fn copy_to_device(
        &self,
        to: u64,
        from: *const c_void,
        bytes: usize,
        stream: Stream,
    ) -> Result<()>;

    /// `cuMemcpyDtoHAsync`: from a device to the host.
    ///
    /// # Safety
    ///
    /// Source and destination are as long as `bytes`, and may be read and written then.
    unsafe fn copy_to_host(
        &self,
        to: *mut c_void,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<()>;

    /// `cuMemcpyDtoDAsync`: between addresses that the stream's device reaches.
    ///
    /// # Safety
    ///
    /// Source and destination are as long as `bytes`, and may be read and written then.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<()>;

    /// `cuMemcpyPeerAsync`: from an address of one context to one of another.
    ///
    /// # Safety
    ///
    /// Source and destination are as long as `bytes`, and may be read and written then.
    unsafe fn copy_peer(
        &self,
        to: (u64, Context),
        from: (u64, Context),
        bytes: usize,
        stream: Stream,
    ) -> Result<()>;

    /// `cuStreamWriteValue32`: stores a word, after everything before it in the stream.
    ///
    /// # Safety
    ///
    /// The word is mapped, and may be written then.
    unsafe fn write32(&self, stream: Stream, address: u64, value: u32) -> Result<()>;

    /// `cuStreamWaitValue32`: what comes later in the stream waits for the word.
    ///
    /// # Safety
    ///
    /// The word is mapped until then.
    unsafe fn wait32(
        &self,
        stream: Stream,
        address: u64,
        value: u32,
        compare: Compare,
    ) -> Result<()>;

    /// `cuStreamBatchMemOp`: several at once, in the order of the list.
    ///
    /// # Safety
    ///
    /// The words are mapped, and may be written then.
    unsafe fn mem_ops(&self, stream: Stream, operations: &[MemOp]) -> Result<()>;

    /// `cuThreadExchangeStreamCaptureMode`: what this thread may call while captures are under way; gives what it might
    /// before.
    fn capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;

    /// `cuStreamBeginCapture`: notes what comes, in thread-local mode, until [`capture_end`](Self::capture_end).
    fn capture_begin(&self, stream: Stream) -> Result<()>;

    /// `cuStreamEndCapture`: the graph of what was noted.
    fn capture_end(&self, stream: Stream) -> Result<Graph>;

    /// `cuGraphInstantiate`: makes it ready. The graph may be destroyed afterwards.
    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec>;

    /// `cuGraphLaunch`: all of it, once.
    ///
    /// # Safety
    ///
    /// Everything that was captured may happen again.
    unsafe fn graph_launch(&self, graph: GraphExec, stream: Stream) -> Result<()>;

    /// `cuGraphDestroy`
    ///
    /// # Safety
    ///
    /// The handle is not used again.
    unsafe fn graph_destroy(&self, graph: Graph) -> Result<()>;

    /// `cuGraphExecDestroy`: a launch that is under way is still done.
    ///
    /// # Safety
    ///
    /// The handle is not used again.
    unsafe fn graph_exec_destroy(&self, graph: GraphExec) -> Result<()>;
}

/// Code.
pub trait Kernels {
    /// `cuModuleLoadDataEx`: compiles PTX for the current context's device. The failure carries the compiler's log.
    fn module_load(&self, ptx: &str) -> Result<Module>;

    /// `cuModuleUnload`
    ///
    /// # Safety
    ///
    /// Neither it nor its functions are used again, and none runs.
    unsafe fn module_unload(&self, module: Module) -> Result<()>;

    /// `cuModuleGetFunction`: a kernel by its name.
    fn module_function(&self, module: Module, name: &str) -> Result<Function>;

    /// `cuFuncGetAttribute`
    fn function_attribute(&self, function: Function, which: FunctionAttribute) -> Result<i32>;

    /// `cuOccupancyMaxActiveBlocksPerMultiprocessor`: blocks of so many threads, without dynamic shared memory, that are
    /// on a multiprocessor at once.
    fn max_active_blocks(&self, function: Function, threads: u32) -> Result<u32>;

    /// `cuLaunchKernel`, or `cuLaunchKernelEx` for a cooperative or programmatic launch. The parameters are read before
    /// it returns.
    ///
    /// # Safety
    ///
    /// `parameters` has a pointer to a value of the right type for each parameter of the kernel, and what the kernel
    /// does with them is sound when it runs.
    unsafe fn launch(&self, launch: &Launch, parameters: &[*mut c_void]) -> Result<()>;
}

/// A failure with words of one's own.
pub(super) fn refuse<T>(call: &'static str, code: i32, why: impl Into<String>) -> Result<T> {
    Err(Failure::new(call, code, why))
}
