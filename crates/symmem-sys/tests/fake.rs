//! The fake driver: that its memory is shared, its failures come as planned, and nothing is lost.
#![allow(
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    reason = "tests stop at the first surprise, and every handle and address is their own"
)]

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::process::Command;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

use symmem_sys::cuda::fake::{Config, Fabric, Fake};
use symmem_sys::cuda::{
    Access, Attribute, Capture, CaptureMode, Compare, Device, Driver, Granularity, HandleType,
    Launch, MemOp, Memory, MemoryProperties, MulticastProperties, Stream, code,
};

const STEP: usize = 2 << 20;
const PTX: &str = ".version 8.4\n.target sm_80\n.visible .entry fill(.param .u64 p) { ret; }";

/// The driver with the first device's context current.
fn start(fake: &Arc<Fake>) -> Arc<dyn Driver> {
    let driver: Arc<dyn Driver> = Arc::clone(fake) as _;
    driver.init().unwrap();
    let context = driver.context_retain(Device(0)).unwrap();
    driver.context_set(Some(context)).unwrap();
    driver
}

fn properties(handle: HandleType) -> MemoryProperties {
    MemoryProperties { device: Device(0), handle, rdma: false }
}

fn map(driver: &dyn Driver, memory: Memory) -> u64 {
    let address = driver.reserve(STEP, 0).unwrap();
    unsafe { driver.map(address, STEP, 0, memory) }.unwrap();
    unsafe { driver.set_access(address, STEP, &[Device(0)], Access::ReadWrite) }.unwrap();
    address
}

fn unmap(driver: &dyn Driver, address: u64) {
    unsafe { driver.unmap(address, STEP) }.unwrap();
    unsafe { driver.free_address(address, STEP) }.unwrap();
}

fn word(address: u64) -> u32 {
    unsafe { with_exposed_provenance::<u32>(address as usize).read_volatile() }
}

#[test]
fn two_mappings_of_exported_memory_are_the_same_memory() {
    let (ours, theirs) = (Fake::plain(1), Fake::plain(1));
    let (a, b) = (start(&ours), start(&theirs));
    let memory = a.create(STEP, &properties(HandleType::Fd)).unwrap();
    let fd = a.export_fd(memory).unwrap();
    let imported = b.import_fd(fd.as_fd()).unwrap();
    let (here, there) = (map(&*a, memory), map(&*b, imported));
    unsafe { a.memset32(here + 8, 7, 2, Stream::DEFAULT) }.unwrap();
    assert_eq!([0, 8, 12, 16].map(|at| word(there + at)), [0, 7, 7, 0]);
    let mut back = 0_u32;
    let to = (&raw mut back).cast::<c_void>();
    unsafe { b.copy_to_host(to, there + 8, 4, Stream::DEFAULT) }.unwrap();
    assert_eq!(back, 7);
    assert_eq!(b.pointer_info(there + 100).unwrap().base, there);
    assert_eq!(b.pointer_info(1).unwrap_err().code, code::INVALID_VALUE);
}

#[test]
fn memory_is_shared_between_processes() {
    const CHILD: &str = "SYMMEM_FAKE_CHILD";
    if let Ok(fd) = std::env::var(CHILD) {
        let driver = start(&Fake::plain(1));
        let fd = unsafe { BorrowedFd::borrow_raw(fd.parse().unwrap()) };
        let address = map(&*driver, driver.import_fd(fd).unwrap());
        assert_eq!(word(address), 41);
        unsafe { driver.write32(Stream::DEFAULT, address + 4, 42) }.unwrap();
        return;
    }
    let driver = start(&Fake::plain(1));
    let memory = driver.create(STEP, &properties(HandleType::Fd)).unwrap();
    let address = map(&*driver, memory);
    unsafe { driver.write32(Stream::DEFAULT, address, 41) }.unwrap();
    let fd = driver.export_fd(memory).unwrap();
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "memory_is_shared_between_processes"]);
    let status = child.env(CHILD, fd.as_raw_fd().to_string()).status().unwrap();
    assert!(status.success());
    unsafe { driver.wait32(Stream::DEFAULT, address + 4, 42, Compare::Equal) }.unwrap();
}

#[test]
fn fabric_handles_work_where_they_are_permitted() {
    let config = |fabric| Config { fabric, ..Config::default() };
    let wanted = properties(HandleType::Fabric);
    let refused = |fabric| {
        let driver = start(&Fake::new(vec![config(fabric)]));
        (
            driver.has(Attribute::FabricHandles, Device(0)),
            driver.create(STEP, &wanted).unwrap_err().code,
        )
    };
    assert_eq!(refused(Fabric::No), (false, code::NOT_SUPPORTED));
    assert_eq!(refused(Fabric::NotPermitted), (true, code::NOT_PERMITTED));
    let fake = Fake::new(vec![config(Fabric::Yes)]);
    let driver = start(&fake);
    let memory = driver.create(STEP, &wanted).unwrap();
    assert_eq!(driver.export_fd(memory).unwrap_err().code, code::INVALID_VALUE);
    let handle = driver.export_fabric(memory).unwrap();
    let again = driver.import_fabric(&handle).unwrap();
    let (a, b) = (map(&*driver, memory), map(&*driver, again));
    unsafe { driver.memset8(a, 1, 4, Stream::DEFAULT) }.unwrap();
    assert_eq!(word(b), 0x0101_0101);
    assert_eq!(driver.import_fabric(&[0; 64]).unwrap_err().code, code::INVALID_VALUE);
    let either = driver.create(STEP, &properties(HandleType::FdOrFabric)).unwrap();
    driver.import_fd(driver.export_fd(either).unwrap().as_fd()).unwrap();
    driver.import_fabric(&driver.export_fabric(either).unwrap()).unwrap();
    let count = |call| fake.calls(call);
    assert_eq!((count("export_fabric"), count("import_fabric")), (2, 3));
    let last = &fake.history()[fake.history().len() - 2..];
    assert_eq!(last, ["cuMemImportFromShareableHandle", "import_fabric"]);
}

#[test]
fn the_nth_call_fails_and_only_that() {
    let fake = Fake::plain(1);
    let driver = start(&fake);
    let create = || driver.create(STEP, &properties(HandleType::None));
    create().unwrap();
    fake.fail("cuMemCreate", 2, code::OUT_OF_MEMORY);
    create().unwrap();
    let failure = create().unwrap_err();
    assert_eq!((failure.call, failure.code), ("cuMemCreate", code::OUT_OF_MEMORY));
    assert_eq!(failure.name, "CUDA_ERROR_OUT_OF_MEMORY");
    create().unwrap();
    assert_eq!(fake.calls("cuMemCreate"), 4);
    fake.fail_always("cuMemCreate", code::MISSING_SYMBOL);
    assert!((0..2).all(|_| create().is_err_and(|failure| failure.is_unsupported())));
}

#[test]
fn whatever_is_not_given_back_is_listed() {
    let fake = Fake::plain(1);
    let driver = start(&fake);
    let memory = driver.create(STEP, &properties(HandleType::Fd)).unwrap();
    let address = map(&*driver, memory);
    let stream = driver.stream_create().unwrap();
    let event = driver.event_create(false).unwrap();
    let host = driver.host_alloc(100).unwrap();
    let module = driver.module_load(PTX).unwrap();
    assert_eq!(fake.live().len(), 8, "{:#?}", fake.live());
    unsafe { driver.release(memory) }.unwrap();
    assert!(fake.live().iter().any(|line| line.contains("0 handles, 1 mappings")));
    let retained = driver.retain(address).unwrap();
    unsafe { driver.release(retained) }.unwrap();
    unmap(&*driver, address);
    unsafe { driver.stream_destroy(stream) }.unwrap();
    unsafe { driver.event_destroy(event) }.unwrap();
    unsafe { driver.host_free(host.host) }.unwrap();
    unsafe { driver.module_unload(module) }.unwrap();
    unsafe { driver.context_release(Device(0)) }.unwrap();
    assert_eq!(fake.live(), [""; 0]);
}

#[test]
fn a_wrong_order_is_refused() {
    let fake = Fake::plain(1);
    assert_eq!(fake.lacking_init(), code::NOT_INITIALIZED);
    let driver = start(&fake);
    let memory = driver.create(STEP, &properties(HandleType::Fd)).unwrap();
    assert_eq!(driver.create(100, &properties(HandleType::Fd)).unwrap_err().code, 1);
    let address = driver.reserve(2 * STEP, 0).unwrap();
    let code_of = |answer: symmem_sys::cuda::Result<()>| answer.unwrap_err().code;
    assert_eq!(code_of(unsafe { driver.unmap(address, STEP) }), code::INVALID_VALUE);
    assert_eq!(code_of(unsafe { driver.map(1 << 40, STEP, 0, memory) }), code::INVALID_VALUE);
    unsafe { driver.map(address, STEP, 0, memory) }.unwrap();
    assert_eq!(code_of(unsafe { driver.map(address, STEP, 0, memory) }), code::INVALID_VALUE);
    let set = |at| unsafe { driver.memset8(at, 0, 1, Stream::DEFAULT) };
    assert_eq!(code_of(set(address)), code::ILLEGAL_ADDRESS);
    unsafe { driver.set_access(address, STEP, &[Device(0)], Access::ReadWrite) }.unwrap();
    set(address).unwrap();
    assert_eq!(code_of(set(address + STEP as u64)), code::ILLEGAL_ADDRESS);
    assert_eq!(code_of(unsafe { driver.free_address(address, 2 * STEP) }), code::INVALID_VALUE);
    assert_eq!(code_of(unsafe { driver.unmap(address, STEP / 2) }), code::INVALID_VALUE);
    unsafe { driver.release(memory) }.unwrap();
    assert_eq!(code_of(unsafe { driver.release(memory) }), code::INVALID_VALUE);
    driver.context_set(None).unwrap();
    assert_eq!(driver.stream_create().unwrap_err().code, code::INVALID_CONTEXT);
}

/// What a call answers before `cuInit`.
trait LackingInit {
    fn lacking_init(&self) -> i32;
}

impl LackingInit for Arc<Fake> {
    fn lacking_init(&self) -> i32 {
        let driver: Arc<dyn Driver> = Arc::clone(self) as _;
        driver.device_count().unwrap_err().code
    }
}

#[test]
fn kernels_are_rust_functions_also_in_graphs() {
    let fake = Fake::plain(1);
    let driver = start(&fake);
    fake.kernel("fill", &[8], |launched| {
        let at = with_exposed_provenance_mut::<u32>(launched.u64(0).unwrap() as usize);
        let before = unsafe { at.read() };
        unsafe { at.write(before + launched.grid[0]) };
    });
    let address = map(&*driver, driver.create(STEP, &properties(HandleType::None)).unwrap());
    let module = driver.module_load(PTX).unwrap();
    assert_eq!(driver.module_function(module, "fil").unwrap_err().code, code::NOT_FOUND);
    assert_eq!(driver.module_load("hello").unwrap_err().code, code::INVALID_PTX);
    let function = driver.module_function(module, "fill").unwrap();
    let stream = driver.stream_create().unwrap();
    let launch = |launch: Launch| {
        let mut parameter = address;
        unsafe { driver.launch(&launch, &[(&raw mut parameter).cast()]) }
    };
    let plain = Launch::new(function, 3, 128, stream);
    launch(plain).unwrap();
    assert_eq!(word(address), 3);
    let too_large = Launch { grid: [1000, 1, 1], cooperative: true, ..plain };
    assert_eq!(launch(too_large).unwrap_err().code, code::COOPERATIVE_LAUNCH_TOO_LARGE);
    driver.capture_begin(stream).unwrap();
    assert!(matches!(driver.stream_capture(stream).unwrap(), Capture::Active(_)));
    launch(plain).unwrap();
    unsafe { driver.mem_ops(stream, &[MemOp::Write64 { address: address + 8, value: 9 }]) }
        .unwrap();
    assert_eq!((word(address), word(address + 8)), (3, 0));
    let graph = driver.capture_end(stream).unwrap();
    let exec = driver.graph_instantiate(graph).unwrap();
    unsafe { driver.graph_launch(exec, stream) }.unwrap();
    unsafe { driver.graph_launch(exec, stream) }.unwrap();
    assert_eq!((word(address), word(address + 8)), (9, 9));
    let launches = fake.launches();
    assert_eq!(launches.len(), 3);
    assert_eq!((launches[2].function.as_str(), launches[2].count), ("fill", 1));
}

#[test]
fn a_capture_is_ended_by_what_its_thread_may_not_do() {
    let fake = Fake::plain(1);
    let driver = start(&fake);
    let (stream, other) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    // In another thread it does no harm, nor in this one where the thread says that it knows.
    driver.capture_begin(stream).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| driver.stream_query(other).unwrap());
    });
    assert_eq!(driver.capture_mode(CaptureMode::Relaxed).unwrap(), CaptureMode::Global);
    assert!(driver.stream_query(other).unwrap());
    assert_eq!(driver.capture_mode(CaptureMode::Global).unwrap(), CaptureMode::Relaxed);
    let graph = driver.capture_end(stream).unwrap();
    unsafe { driver.graph_destroy(graph) }.unwrap();

    driver.capture_begin(stream).unwrap();
    let refused = driver.stream_query(other).unwrap_err();
    assert_eq!(refused.code, code::STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(driver.stream_capture(stream).unwrap(), Capture::Invalidated);
    let ended = driver.capture_end(stream).unwrap_err();
    assert_eq!(ended.code, code::STREAM_CAPTURE_INVALIDATED);
    assert_eq!(driver.stream_capture(stream).unwrap(), Capture::None);
}

#[test]
fn multicast_objects_take_memory_of_added_devices_only() {
    let config = Config { multicast: true, ..Config::default() };
    let fake = Fake::new(vec![config.clone(), config]);
    let driver = start(&fake);
    let wanted = MulticastProperties { devices: 2, bytes: STEP, handle: HandleType::Fd };
    assert_eq!(driver.multicast_granularity(&wanted, Granularity::Minimum).unwrap(), STEP);
    let object = driver.multicast_create(&wanted).unwrap();
    let memory = driver.create(STEP, &properties(HandleType::Fd)).unwrap();
    let bind = || unsafe { driver.multicast_bind(object, 0, memory, 0, STEP) };
    driver.multicast_add(object, Device(0)).unwrap();
    assert_eq!(bind().unwrap_err().code, code::INVALID_VALUE);
    driver.multicast_add(object, Device(1)).unwrap();
    fake.fail("cuMulticastBindMem", 1, code::SYSTEM_NOT_READY);
    assert_eq!(bind().unwrap_err().code, code::SYSTEM_NOT_READY);
    bind().unwrap();
    assert_eq!(bind().unwrap_err().code, code::INVALID_VALUE);
    let address = map(&*driver, object);
    let elsewhere = driver.import_fd(driver.export_fd(object).unwrap().as_fd()).unwrap();
    driver.multicast_add(elsewhere, Device(0)).unwrap();
    unmap(&*driver, address);
    unsafe { driver.multicast_unbind(object, Device(0), 0, STEP) }.unwrap();
    assert!(unsafe { driver.multicast_unbind(object, Device(0), 0, STEP) }.is_err());
    let without = start(&Fake::plain(1));
    assert!(without.multicast_create(&wanted).unwrap_err().is_unsupported());
}

#[test]
fn a_device_reaches_what_it_was_given_access_to() {
    let fake = Fake::plain(2);
    let driver = start(&fake);
    let contexts = [0, 1].map(|device| driver.context_retain(Device(device)).unwrap());
    let place = |device| {
        let wanted = MemoryProperties { device, handle: HandleType::None, rdma: false };
        let memory = driver.create(STEP, &wanted).unwrap();
        let address = driver.reserve(STEP, 0).unwrap();
        unsafe { driver.map(address, STEP, 0, memory) }.unwrap();
        unsafe { driver.set_access(address, STEP, &[device], Access::ReadWrite) }.unwrap();
        address
    };
    let [a, b] = [0, 1].map(|device| place(Device(device)));
    unsafe { driver.memset32(a, 5, 1, Stream::DEFAULT) }.unwrap();
    let copy = || unsafe { driver.copy(b, a, 4, Stream::DEFAULT) };
    assert_eq!(copy().unwrap_err().code, code::ILLEGAL_ADDRESS);
    let (to, from) = ((b, contexts[1]), (a, contexts[0]));
    unsafe { driver.copy_peer(to, from, 4, Stream::DEFAULT) }.unwrap();
    assert_eq!(word(b), 5);
    unsafe { driver.set_access(b, STEP, &[Device(0)], Access::Read) }.unwrap();
    assert_eq!(copy().unwrap_err().code, code::ILLEGAL_ADDRESS);
    unsafe { driver.set_access(b, STEP, &[Device(0)], Access::ReadWrite) }.unwrap();
    copy().unwrap();
    assert_eq!(driver.pointer_info(b).unwrap().device, Device(1));
    assert_eq!(driver.memory_info().unwrap().free, (1 << 30) - STEP);
}

#[test]
fn a_stream_waits_for_a_word_from_another_thread() {
    let fake = Fake::plain(1);
    let driver = start(&fake);
    let address = map(&*driver, driver.create(STEP, &properties(HandleType::None)).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let driver = start(&fake);
            let one = MemOp::Wait32 { address, value: 1, compare: Compare::GreaterOrEqual };
            let two = MemOp::Write64 { address: address + 8, value: 2 };
            unsafe { driver.mem_ops(Stream::DEFAULT, &[one, two]) }.unwrap();
        });
        unsafe { driver.write32(Stream::DEFAULT, address, 1) }.unwrap();
        let compare = Compare::And;
        unsafe { driver.wait32(Stream::DEFAULT, address + 8, 2, compare) }.unwrap();
    });
    let odd = unsafe { driver.write32(Stream::DEFAULT, address + 1, 1) };
    assert_eq!(odd.unwrap_err().code, code::INVALID_VALUE);
}
