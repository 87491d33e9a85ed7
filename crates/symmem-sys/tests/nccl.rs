//! The table of NCCL's functions, against the shared object that stands in for it.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::os::unix::Library;
use symmem_sys::cuda::{Device, Stream};
use symmem_sys::nccl::{
    Comm, Config, DataType, Failure, Nccl, RedOp, ShrinkFlags, Span, WaitSignal, Window,
    WindowFlags,
};

/// The library has one state.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

struct Fake {
    library: Library,
    path: PathBuf,
    _held: MutexGuard<'static, ()>,
}

impl Fake {
    fn new() -> Self {
        let held = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let path = std::env::current_exe().unwrap().with_file_name("libsymmem_fake_nccl.so");
        // SAFETY: it has no initialisers.
        let library = unsafe { Library::new(&path) }.unwrap();
        let fake = Self { library, path, _held: held };
        fake.tell::<extern "C" fn()>("fakeNcclReset")();
        fake
    }

    fn of_version(&self, code: i32) -> Nccl {
        self.tell::<extern "C" fn(c_int)>("fakeNcclVersion")(code);
        Nccl::open(&self.path).unwrap()
    }

    fn live(&self) -> Vec<i32> {
        let count = self.tell::<extern "C" fn(c_int) -> c_int>("fakeNcclLive");
        (0..5).map(|what| count(what)).collect()
    }

    fn tell<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the types stand in `symmem-fake-nccl`, in `script.rs`.
        *unsafe { self.library.get::<F>(name) }.unwrap()
    }
}

/// A communicator of two ranks of this thread, which block.
fn pair(nccl: &Nccl) -> Vec<Comm> {
    nccl.init_all(&[Device(0), Device(1)]).unwrap()
}

fn destroy(nccl: &Nccl, comms: &[Comm]) {
    for comm in comms {
        // SAFETY: live, and not used again.
        unsafe { nccl.finalize(*comm) }.unwrap();
        // SAFETY: likewise.
        unsafe { nccl.destroy(*comm) }.unwrap();
    }
}

/// Memory of NCCL's for each rank, with a window onto it, all in one group.
fn windows(nccl: &Nccl, comms: &[Comm], bytes: usize) -> Vec<(u64, Window)> {
    let memory: Vec<u64> = comms.iter().map(|_| nccl.mem_alloc(bytes).unwrap()).collect();
    nccl.group_start().unwrap();
    let begun: Vec<_> = comms
        .iter()
        .zip(&memory)
        .map(|(comm, memory)| {
            // SAFETY: the memory is there until the window is not.
            unsafe { nccl.window_register(*comm, *memory, bytes, WindowFlags::CollSymmetric) }
        })
        .collect();
    nccl.group_end().unwrap();
    // SAFETY: the communicators block, and the group is over.
    let made = begun.into_iter().map(|one| unsafe { one.unwrap().end() }.unwrap());
    memory.iter().copied().zip(made).collect()
}

#[test]
#[allow(clippy::multiple_unsafe_ops_per_block, reason = "none of the operations is done")]
fn every_function_of_a_later_version_says_which() {
    let fake = Fake::new();
    let nccl = fake.of_version(22105);
    let comm = pair(&nccl);
    // SAFETY: this version refuses before anything is looked at.
    let window = unsafe { Window::from_raw(64) };
    let (stream, span) = (Stream::DEFAULT, Span { count: 1, kind: DataType::U8 });
    let wait = WaitSignal { count: 1, peer: 0, signal: 0, context: 0 };
    let float8 = Span { count: 1, kind: DataType::F8E4M3 };
    // SAFETY: likewise, for all of them.
    let failures: Vec<(Failure, &str)> = unsafe {
        let [one, _] = comm[..] else { unreachable!() };
        vec![
            (nccl.shrink(one, &[1], ShrinkFlags::Default, &Config::default()).unwrap_err(), "2.27"),
            (nccl.window_register(one, 4096, 1, WindowFlags::Default).unwrap_err(), "2.27"),
            (nccl.window_deregister(one, window).unwrap_err(), "2.27"),
            (nccl.window_address(one, window).unwrap_err(), "2.29"),
            (nccl.peer_address(window, 0, 1).unwrap_err(), "2.29"),
            (nccl.lsa_address(window, 0, 1).unwrap_err(), "2.29"),
            (nccl.multimem_address(window, 0).unwrap_err(), "2.29"),
            (nccl.put_signal(one, 0, span, 1, window, 0, stream).unwrap_err(), "2.29"),
            (nccl.signal(one, 1, stream).unwrap_err(), "2.29"),
            (nccl.wait_signal(one, &[wait], stream).unwrap_err(), "2.29"),
            (nccl.all_reduce(one, 0, 0, float8, RedOp::SUM, stream).unwrap_err(), "2.24"),
        ]
    };
    for (failure, version) in failures {
        let expected = format!("{} needs NCCL {version}, 2.21.5 is loaded", failure.call);
        assert_eq!(failure.to_string(), expected);
        assert!(failure.is_unsupported());
    }
    destroy(&nccl, &comm);
    assert_eq!(fake.live(), [0; 5]);
}

#[test]
fn communicators_of_all_kinds_say_who_they_are() {
    let fake = Fake::new();
    let nccl = fake.of_version(23203);
    let pair = pair(&nccl);
    for (rank, comm) in pair.iter().enumerate() {
        // SAFETY: live and ready.
        assert_eq!(unsafe { nccl.user_rank(*comm) }, Ok(rank));
        // SAFETY: likewise.
        assert_eq!(unsafe { nccl.count(*comm) }, Ok(2));
        // SAFETY: likewise.
        assert_eq!(unsafe { nccl.device(*comm) }, Ok(Device(rank as i32)));
        // SAFETY: likewise.
        assert_eq!(unsafe { nccl.async_error(*comm) }, Ok(()));
    }
    let id = nccl.unique_id().unwrap();
    let alone = nccl.init_rank_plainly(1, &id, 0).unwrap();
    // SAFETY: it blocks, so the call is over.
    let alone = unsafe { alone.end() }.unwrap();
    destroy(&nccl, &pair);
    destroy(&nccl, &[alone]);
    assert_eq!(fake.live(), [0; 5]);
}

#[test]
fn what_does_not_block_is_in_progress_until_all_have_come() {
    let fake = Fake::new();
    let nccl = fake.of_version(23203);
    let id = nccl.unique_id().unwrap();
    let config = Config { blocking: Some(false) };
    let first = nccl.init_rank(2, &id, 0, &config).unwrap();
    let comm = first.peek().unwrap();
    // SAFETY: live.
    let failure = unsafe { nccl.async_error(comm) }.unwrap_err();
    assert!(failure.is_in_progress(), "{failure}");
    let second = nccl.init_rank(2, &id, 1, &config).unwrap();
    // SAFETY: live.
    assert_eq!(unsafe { nccl.async_error(comm) }, Ok(()));
    // SAFETY: both are ready.
    let made = [unsafe { first.end() }.unwrap(), unsafe { second.end() }.unwrap()];
    // SAFETY: live, and not used again.
    made.iter().for_each(|comm| unsafe { nccl.abort(*comm) }.unwrap());
    assert_eq!(fake.live(), [0; 5]);
}

#[test]
fn a_put_and_its_signal_reach_the_window_of_the_peer() {
    let fake = Fake::new();
    let nccl = fake.of_version(22902);
    let comms = pair(&nccl);
    let parts = windows(&nccl, &comms, 4096);
    let data = [1_u32, 2, 3];
    let from = data.as_ptr().expose_provenance() as u64;
    let (span, stream) = (Span { count: 3, kind: DataType::U32 }, Stream::DEFAULT);
    // SAFETY: within the window, of data that lives.
    unsafe { nccl.put_signal(comms[0], from, span, 1, parts[0].1, 8, stream) }.unwrap();
    // SAFETY: live.
    unsafe { nccl.signal(comms[0], 1, stream) }.unwrap();
    let wait = WaitSignal { count: 2, peer: 0, signal: 0, context: 0 };
    // SAFETY: live.
    unsafe { nccl.wait_signal(comms[1], &[wait], stream) }.unwrap();
    // SAFETY: the window is live.
    let address = unsafe { nccl.peer_address(parts[0].1, 8, 1) }.unwrap().unwrap();
    assert_eq!(address, parts[1].0 + 8);
    let there = std::ptr::with_exposed_provenance::<[u32; 3]>(address as usize);
    // SAFETY: memory of this process, which was just written.
    assert_eq!(unsafe { there.read() }, data);
    // SAFETY: the window is live.
    let beyond = unsafe { nccl.put_signal(comms[0], from, span, 1, parts[0].1, 4092, stream) };
    assert_eq!(beyond.unwrap_err().code, Failure::INVALID_ARGUMENT);
    give_back(&nccl, &comms, &parts);
    assert_eq!(fake.live(), [0; 5]);
}

#[test]
fn addresses_are_given_where_there_are_any() {
    let fake = Fake::new();
    let nccl = fake.of_version(22902);
    let comms = pair(&nccl);
    let parts = windows(&nccl, &comms, 4096);
    let window = parts[0].1;
    // SAFETY: the window is live, here and below.
    assert_eq!(unsafe { nccl.window_address(comms[0], window) }, Ok(parts[0].0));
    // SAFETY: likewise.
    assert_eq!(unsafe { nccl.lsa_address(window, 4, 1) }, Ok(parts[1].0 + 4));
    // SAFETY: likewise.
    assert_eq!(unsafe { nccl.multimem_address(window, 0) }, Ok(None));
    let tell = fake.tell::<extern "C" fn(c_int, c_int, c_int)>("fakeNcclWindows");
    tell(1, 1, 1);
    // SAFETY: likewise.
    assert_eq!(unsafe { nccl.peer_address(window, 0, 1) }, Ok(None));
    // SAFETY: likewise.
    assert_eq!(unsafe { nccl.peer_address(window, 0, 0) }, Ok(Some(parts[0].0)));
    // SAFETY: likewise.
    assert!(unsafe { nccl.multimem_address(window, 0) }.unwrap().is_some());
    // SAFETY: likewise.
    let nobody = unsafe { nccl.lsa_address(window, 0, 5) }.unwrap_err();
    assert_eq!(nobody.code, Failure::INVALID_ARGUMENT);
    // SAFETY: the memory is not used, but still has a window.
    let early = unsafe { nccl.mem_free(parts[0].0) }.unwrap_err();
    assert!(early.to_string().ends_with("the memory still has a window"), "{early}");
    give_back(&nccl, &comms, &parts);
    assert_eq!(fake.live(), [0; 5]);
}

fn give_back(nccl: &Nccl, comms: &[Comm], parts: &[(u64, Window)]) {
    for (comm, (memory, window)) in comms.iter().zip(parts) {
        // SAFETY: nobody uses them again.
        unsafe { nccl.window_deregister(*comm, *window) }.unwrap();
        // SAFETY: likewise.
        unsafe { nccl.mem_free(*memory) }.unwrap();
    }
    destroy(nccl, comms);
}
