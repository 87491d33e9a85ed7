//! The real driver on a machine that has one: `cargo test -p symmem-sys --test gpu -- --ignored`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::undocumented_unsafe_blocks,
    reason = "tests stop at the first surprise, and every handle and address is their own"
)]

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::sync::Arc;

use symmem_sys::cuda::{
    Access, Attribute, Capture, CaptureMode, Compare, Context, Device, Driver, FunctionAttribute,
    Granularity, HandleType, Launch, MemOp, MemoryProperties, MulticastProperties, Stream, code,
    load,
};
use symmem_sys::nvml;

/// Adds a number to a word.
const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 word, .param .u32 what)
{
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd0, [word];
    ld.param.u32 %r0, [what];
    atom.global.add.u32 %r1, [%rd0], %r0;
    ret;
}
";

/// A context of the first device, current for this thread.
fn start() -> (Arc<dyn Driver>, Device, Context) {
    let driver = load().expect("a driver");
    driver.init().unwrap();
    let device = driver.device(0).unwrap();
    let context = driver.context_retain(device).unwrap();
    driver.context_set(Some(context)).unwrap();
    (driver, device, context)
}

/// Maps a piece of memory, twice, the second time through an exported descriptor.
fn mapped_twice(driver: &dyn Driver, device: Device) -> (usize, [u64; 2]) {
    let properties = MemoryProperties { device, handle: HandleType::Fd, rdma: false };
    let bytes = driver.granularity(&properties, Granularity::Minimum).unwrap();
    let memory = driver.create(bytes, &properties).unwrap();
    let fd = driver.export_fd(memory).unwrap();
    let again = driver.import_fd(fd.as_fd()).unwrap();
    let place = |memory| {
        let address = driver.reserve(bytes, bytes).unwrap();
        unsafe { driver.map(address, bytes, 0, memory) }.unwrap();
        unsafe { driver.set_access(address, bytes, &[device], Access::ReadWrite) }.unwrap();
        unsafe { driver.release(memory) }.unwrap();
        address
    };
    (bytes, [place(memory), place(again)])
}

fn word(driver: &dyn Driver, address: u64, stream: Stream) -> u32 {
    let mut value = 0_u32;
    unsafe { driver.copy_to_host((&raw mut value).cast(), address, 4, stream) }.unwrap();
    driver.stream_synchronize(stream).unwrap();
    value
}

#[test]
#[ignore = "needs a GPU"]
fn a_device_says_what_it_is() {
    let (driver, device, context) = start();
    assert!(driver.version().unwrap() >= 12030);
    assert!(!driver.device_name(device).unwrap().is_empty());
    assert_ne!(driver.device_uuid(device).unwrap(), [0; 16]);
    assert_eq!(driver.pci_bus_id(device).unwrap().len(), 12);
    assert!(driver.has(Attribute::VirtualMemory, device));
    assert!(driver.attribute(Attribute::SmCount, device).unwrap() > 0);
    assert_eq!(driver.context_current().unwrap(), Some(context));
    assert_eq!(driver.context_device().unwrap(), device);
    let info = driver.memory_info().unwrap();
    assert!(info.free <= info.total && info.total <= driver.total_memory(device).unwrap());
    let failure = driver.device(1000).unwrap_err();
    assert_eq!((failure.code, failure.call), (code::INVALID_DEVICE, "cuDeviceGet"));
    assert_eq!(failure.name, "CUDA_ERROR_INVALID_DEVICE");
    let multicast = MulticastProperties { devices: 2, bytes: 2 << 20, handle: HandleType::Fd };
    if !driver.has(Attribute::Multicast, device) {
        assert!(driver.multicast_create(&multicast).unwrap_err().is_unsupported());
    }
}

#[test]
#[ignore = "needs a GPU"]
fn exported_memory_is_the_same_memory() {
    let (driver, device, _) = start();
    let (bytes, [a, b]) = mapped_twice(&*driver, device);
    let stream = driver.stream_create().unwrap();
    unsafe { driver.memset32(a, 7, bytes / 4, stream) }.unwrap();
    assert_eq!(word(&*driver, b + 4, stream), 7);
    unsafe { driver.write32(stream, b + 4, 9) }.unwrap();
    let operations = [
        MemOp::Wait32 { address: a + 4, value: 9, compare: Compare::Equal },
        MemOp::Write64 { address: a + 8, value: 1 << 32 | 5 },
    ];
    unsafe { driver.mem_ops(stream, &operations) }.unwrap();
    unsafe { driver.wait32(stream, a + 8, 5, Compare::GreaterOrEqual) }.unwrap();
    assert_eq!(word(&*driver, b + 12, stream), 1);
    let info = driver.pointer_info(b + 4).unwrap();
    assert_eq!((info.device, info.host, info.base, info.bytes), (device, false, b, bytes));
    let memory = driver.retain(a).unwrap();
    unsafe { driver.release(memory) }.unwrap();
    for address in [a, b] {
        unsafe { driver.unmap(address, bytes) }.unwrap();
        unsafe { driver.free_address(address, bytes) }.unwrap();
    }
    unsafe { driver.stream_destroy(stream) }.unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_run_from_launches_and_from_graphs() {
    let (driver, device, context) = start();
    let (_, [word_at, _]) = mapped_twice(&*driver, device);
    let stream = driver.stream_create().unwrap();
    assert_eq!(driver.stream_context(stream).unwrap(), context);
    unsafe { driver.memset8(word_at, 0, 16, stream) }.unwrap();
    let module = driver.module_load(PTX).unwrap();
    let function = driver.module_function(module, "add").unwrap();
    assert!(driver.function_attribute(function, FunctionAttribute::Registers).unwrap() > 0);
    assert!(driver.max_active_blocks(function, 32).unwrap() > 0);
    let (mut address, mut what) = (word_at, 3_u32);
    let launch = |launch: Launch, address: &mut u64, what: &mut u32| {
        let parameters: [*mut c_void; 2] = [(&raw mut *address).cast(), (&raw mut *what).cast()];
        unsafe { driver.launch(&launch, &parameters) }.unwrap();
    };
    let plain = Launch::new(function, 2, 1, stream);
    launch(plain, &mut address, &mut what);
    launch(Launch { cooperative: true, ..plain }, &mut address, &mut what);
    launch(Launch { programmatic: true, ..plain }, &mut address, &mut what);
    assert_eq!(word(&*driver, word_at, stream), 18);
    driver.capture_begin(stream).unwrap();
    assert!(matches!(driver.stream_capture(stream).unwrap(), Capture::Active(_)));
    launch(plain, &mut address, &mut what);
    let graph = driver.capture_end(stream).unwrap();
    assert_eq!(driver.stream_capture(stream).unwrap(), Capture::None);
    let exec = driver.graph_instantiate(graph).unwrap();
    let (start, end) = (driver.event_create(true).unwrap(), driver.event_create(true).unwrap());
    driver.event_record(start, stream).unwrap();
    unsafe { driver.graph_launch(exec, stream) }.unwrap();
    unsafe { driver.graph_launch(exec, stream) }.unwrap();
    driver.event_record(end, stream).unwrap();
    driver.event_synchronize(end).unwrap();
    assert!(driver.event_query(end).unwrap() && driver.stream_query(stream).unwrap());
    assert!(driver.event_elapsed(start, end).unwrap() > 0.0);
    assert_eq!(word(&*driver, word_at, stream), 30);
    unsafe { driver.graph_exec_destroy(exec) }.unwrap();
    unsafe { driver.graph_destroy(graph) }.unwrap();
    unsafe { driver.module_unload(module) }.unwrap();
}

/// What is given back while something is captured must not end the capture.
#[test]
#[ignore = "needs a GPU"]
fn a_thread_that_captures_may_free_memory_and_ask_about_streams_at_its_own_risk() {
    let (driver, device, _) = start();
    let (bytes, [word_at, again]) = mapped_twice(&*driver, device);
    let properties = MemoryProperties { device, handle: HandleType::Fd, rdma: false };
    let memory = driver.create(bytes, &properties).unwrap();
    let (stream, other) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let event = driver.event_create(false).unwrap();
    driver.event_record(event, other).unwrap();
    let host = driver.host_alloc(64).unwrap();
    driver.capture_begin(stream).unwrap();
    unsafe { driver.memset8(word_at, 1, 16, stream) }.unwrap();
    let had = driver.capture_mode(CaptureMode::Relaxed).unwrap();
    driver.stream_query(other).unwrap();
    driver.event_query(event).unwrap();
    unsafe { driver.unmap(again, bytes) }.unwrap();
    unsafe { driver.free_address(again, bytes) }.unwrap();
    unsafe { driver.release(memory) }.unwrap();
    unsafe { driver.host_free(host.host) }.unwrap();
    assert_eq!(driver.capture_mode(had).unwrap(), CaptureMode::Relaxed);
    assert!(matches!(driver.stream_capture(stream).unwrap(), Capture::Active(_)));
    let graph = driver.capture_end(stream).unwrap();
    unsafe { driver.graph_destroy(graph) }.unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn wrong_code_comes_back_with_the_compilers_words() {
    let (driver, ..) = start();
    let failure = driver.module_load(&PTX.replace("atom.global", "atom.nowhere")).unwrap_err();
    assert_eq!(failure.code, code::INVALID_PTX);
    assert!(failure.text.contains("nowhere") && failure.text.contains("line"), "{failure}");
    let module = driver.module_load(PTX).unwrap();
    assert_eq!(driver.module_function(module, "gone").unwrap_err().code, code::NOT_FOUND);
}

#[test]
#[ignore = "needs a GPU"]
fn pinned_memory_is_seen_by_both_sides() {
    let (driver, ..) = start();
    let memory = driver.host_alloc(4096).unwrap();
    let stream = driver.stream_create().unwrap();
    unsafe { driver.memset32(memory.device, 5, 1, stream) }.unwrap();
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(unsafe { memory.host.cast::<u32>().read_volatile() }, 5);
    assert!(driver.pointer_info(memory.device).unwrap().host);
    unsafe { driver.host_free(memory.host) }.unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn the_management_library_knows_the_device() {
    let (driver, device, _) = start();
    let nvml = nvml::load().unwrap();
    let id = driver.pci_bus_id(device).unwrap();
    let found = nvml.device_by_pci(&id).unwrap();
    assert_eq!(nvml.pci_bus_id(found).unwrap(), id);
    assert_eq!(nvml.name(found).unwrap(), driver.device_name(device).unwrap());
    assert!(nvml.uuid(found).unwrap().starts_with("GPU-"));
    assert!(nvml.device_count().unwrap() > 0);
    assert!(nvml.device_by_index(0).is_ok());
    println!("driver {:?}, cores {:?}", nvml.driver_version(), nvml.cpu_affinity(found));
    println!("fabric {:?}, link 0 {:?}", nvml.fabric(found), nvml.link_active(found, 0));
    println!("{:?} {:?}", nvml.link_end(found, 0), nvml.link_remote(found, 0));
    println!("{:?}", nvml.p2p_status(found, found, nvml::P2p::Read));
    println!("{:?}", nvml.common_ancestor(found, found));
}
