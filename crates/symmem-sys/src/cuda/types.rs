//! Handles, settings and answers of the driver, in Rust's types.
#![allow(unsafe_code)] // S4

use std::ptr::NonNull;

use crate::table::handles;

handles! {
    "driver":
    /// `CUcontext`: what a process has on a device. The library uses primary contexts only.
    Context(usize);
    /// `CUstream`: work that is done in order.
    Stream(usize);
    /// `CUevent`: a point in a stream.
    Event(usize);
    /// `CUmodule`: loaded code.
    Module(usize);
    /// `CUfunction`: a kernel of a module.
    Function(usize);
    /// `CUgraph`: captured work.
    Graph(usize);
    /// `CUgraphExec`: captured work, ready to be launched.
    GraphExec(usize);
    /// `CUmemGenericAllocationHandle`: physical memory of a device, or a multicast object.
    Memory(u64);
}

impl Stream {
    /// The stream that is there without being created.
    pub const DEFAULT: Self = Self(0);
}

/// `CUdevice`: the number of a device among those that this process sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Device(pub i32);

/// What can be asked of a device: `CUdevice_attribute`. Answers are numbers; 1 means yes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Attribute {
    /// Streaming multiprocessors.
    SmCount = 16,
    /// Bytes of the second-level cache.
    L2Bytes = 38,
    /// Compute capability, first number.
    ComputeMajor = 75,
    /// Compute capability, second number.
    ComputeMinor = 76,
    /// Virtual memory management: [`create`](super::VirtualMemory::create), map and the rest.
    VirtualMemory = 102,
    /// Memory can be exported as a file descriptor.
    FdHandles = 103,
    /// Memory can be created for network cards to reach.
    RdmaMemory = 110,
    /// Memory can be exported as a fabric handle. Yes does not mean that it is permitted: try.
    FabricHandles = 128,
    /// Multicast objects.
    Multicast = 132,
    /// The host's NUMA node nearest to the device, or -1.
    HostNumaId = 134,
}

/// What can be asked of two devices: `CUdevice_P2PAttribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum P2pAttribute {
    /// Loads and stores reach the peer.
    Access = 2,
    /// Atomics reach the peer natively.
    NativeAtomics = 3,
}

/// How memory can be handed to other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum HandleType {
    /// Not at all.
    None = 0,
    /// By a file descriptor, on this machine.
    Fd = 1,
    /// By 64 bytes, to every machine on the same NVLink fabric.
    Fabric = 8,
    /// By either.
    FdOrFabric = 9,
}

impl HandleType {
    /// Whether memory that was created for `self` can be exported as `way`.
    pub const fn allows(self, way: Self) -> bool {
        self as i32 & way as i32 == way as i32
    }
}

/// A fabric handle: what [`HandleType::Fabric`] memory is exported as.
pub type FabricHandle = [u8; 64];

/// What kind of memory to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryProperties {
    /// Whose memory.
    pub device: Device,
    /// How it can be exported.
    pub handle: HandleType,
    /// Whether network cards must be able to reach it.
    pub rdma: bool,
}

/// What kind of multicast object to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulticastProperties {
    /// How many devices will be added.
    pub devices: u32,
    /// How much memory each can bind.
    pub bytes: usize,
    /// How it can be exported.
    pub handle: HandleType,
}

/// Which granularity to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Granularity {
    /// Sizes must be multiples of it.
    Minimum = 0,
    /// Sizes that are multiples of it are faster.
    Recommended = 1,
}

/// What a device may do with a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Access {
    /// Nothing.
    None = 0,
    /// Read.
    Read = 1,
    /// Read and write.
    ReadWrite = 3,
}

/// Pinned memory of the host that devices reach too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Where the host finds it.
    pub host: NonNull<u8>,
    /// Where devices find it.
    pub device: u64,
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// The device whose memory it is, or in whose context it was registered.
    pub device: Device,
    /// The context it was allocated in; memory that was mapped belongs to none.
    pub context: Option<Context>,
    /// Whether it is the host's memory.
    pub host: bool,
    /// Where its range starts.
    pub base: u64,
    /// How long its range is.
    pub bytes: usize,
}

/// Free and all memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that can be had now.
    pub free: usize,
    /// All bytes.
    pub total: usize,
}

/// Whether a stream is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// No: work is done.
    None,
    /// Yes, in the capture of this number: work is noted.
    Active(u64),
    /// It was, but an error has ended it.
    Invalidated,
}

/// What a thread may call while captures are under way, `CUstreamCaptureMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum CaptureMode {
    /// Nothing that could touch a capture of any thread: it would end that capture.
    #[default]
    Global = 0,
    /// Nothing that could touch a capture of this thread.
    ThreadLocal = 1,
    /// Everything: the thread knows what it does.
    Relaxed = 2,
}

/// How a stream compares a word with a value while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Compare {
    /// `(word - value) >= 0`, signed, so that counters may wrap.
    GreaterOrEqual = 0,
    /// `word == value`.
    Equal = 1,
    /// `(word & value) != 0`.
    And = 2,
}

/// One of several operations that a stream does at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemOp {
    /// Stores a word, after everything before it in the stream.
    Write32 { address: u64, value: u32 },
    /// Stores a double word, after everything before it in the stream.
    Write64 { address: u64, value: u64 },
    /// Waits for a word.
    Wait32 { address: u64, value: u32, compare: Compare },
    /// Waits for a double word.
    Wait64 { address: u64, value: u64, compare: Compare },
}

/// What can be asked of a kernel: `CUfunction_attribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum FunctionAttribute {
    /// Registers of a thread.
    Registers = 4,
}

/// Where and how large a kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub function: Function,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// In order with what else is in it.
    pub stream: Stream,
    /// All blocks must be on the device at once.
    pub cooperative: bool,
    /// May start before the kernel before it has ended; it waits for that itself.
    pub programmatic: bool,
}

impl Launch {
    /// A plain launch of `blocks` times `threads`, in one dimension.
    pub const fn new(function: Function, blocks: u32, threads: u32, stream: Stream) -> Self {
        let (grid, block) = ([blocks, 1, 1], [threads, 1, 1]);
        Self { function, grid, block, stream, cooperative: false, programmatic: false }
    }
}
