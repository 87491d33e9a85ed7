//! How communicators come to be and go, and what versions lack.

use symmem::nccl::{Feature, Nccl, UniqueId};
use symmem::{Error, ReduceOp};
use symmem_testing::FakeNccl;

use super::{LONG, devices, gpu, ranks};

#[test]
fn a_machine_without_the_library_is_told_where_to_put_it() {
    let error = Nccl::open("/nowhere/libnccl.so.2").unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with("NCCL is not available: NCCL could not be loaded: /now"), "{text}");
    assert!(text.ends_with("its path can be given by SYMMEM_NCCL"), "{text}");
}

#[test]
fn the_version_tells_what_there_is() {
    let fake = FakeNccl::new();
    let has = |nccl: &Nccl| Feature::ALL.map(|feature| nccl.has(feature));
    let nccl = fake.of_version(22809);
    assert_eq!((nccl.version().to_string(), has(&nccl)), ("2.28.9".into(), [true, true, false]));
    let nccl = fake.of_version(21903);
    assert_eq!((nccl.version().minor, has(&nccl)), (19, [false; 3]));
    assert_eq!(has(&fake.of_version(22902)), [true; 3]);
    assert!(nccl.path().unwrap().ends_with("libsymmem_fake_nccl.so"));
}

#[test]
fn a_version_that_is_too_old_is_no_library() {
    let fake = FakeNccl::new();
    let old = std::panic::catch_unwind(|| fake.of_version(21805));
    assert!(old.is_err());
    let text = Nccl::open(fake.path()).unwrap_err().to_string();
    assert!(text.contains("2.18.5 is loaded, but 2.19.0 or later is needed"), "{text}");
}

#[test]
fn an_id_brings_ranks_together() {
    let fake = FakeNccl::new();
    let nccl = fake.nccl();
    let id = nccl.unique_id().unwrap();
    let id = UniqueId::from_bytes(id.as_bytes()).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let nccl = &nccl;
            scope.spawn(move || {
                let communicator = nccl.communicator(&gpu(rank, 3), 3, &id, rank, LONG).unwrap();
                assert_eq!((communicator.rank(), communicator.size()), (rank, 3));
                assert_ne!(communicator.raw(), 0);
                communicator.close().unwrap();
            });
        }
    });
    assert_eq!(fake.live().communicators, 0);
    assert_eq!(fake.calls("ncclCommFinalize"), 3);
    assert_eq!(fake.calls("ncclCommAbort"), 0);
}

#[test]
fn a_rank_beyond_the_size_is_refused() {
    let fake = FakeNccl::new();
    let nccl = fake.nccl();
    let id = nccl.unique_id().unwrap();
    let text = nccl.communicator(&gpu(0, 1), 2, &id, 2, LONG).unwrap_err().to_string();
    assert_eq!(text, "communicator: expected a rank in [0, 2), got 2");
}

#[test]
fn split_makes_a_communicator_for_each_color() {
    let fake = FakeNccl::new();
    ranks(&fake, 5, |rank| {
        let n = rank.number();
        let color = (n != 4).then_some(n as u32 % 2);
        // Backwards by the key.
        let half = rank.communicator.split(color, -(n as i32)).unwrap();
        assert_eq!(half.is_none(), n == 4);
        let Some(half) = half else { return };
        assert_eq!((half.rank(), half.size()), (1 - n / 2, 2));
        let mut x = rank.buffer(&[n as i32]);
        half.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
        assert_eq!(x.read(&rank.stream).unwrap(), [if n % 2 == 0 { 2 } else { 4 }]);
    });
}

#[test]
fn shrink_leaves_ranks_out_and_needs_a_recent_library() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        if rank.number() == 1 {
            return;
        }
        let smaller = rank.communicator.shrink(&[1]).unwrap();
        assert_eq!((smaller.rank(), smaller.size()), (rank.number() / 2, 2));
        let mut x = rank.buffer(&[rank.number() as i32 + 1]);
        smaller.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
        assert_eq!(x.read(&rank.stream).unwrap(), [4]);
        let text = smaller.shrink(&[]).unwrap_err().to_string();
        assert!(text.contains("expected other ranks to leave out"), "{text}");
    });
    let old = fake.of_version(22105);
    let communicator = old.of_devices(&[gpu(0, 1)], LONG).unwrap().remove(0);
    let id = old.unique_id().unwrap();
    drop(communicator);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let old = &old;
            scope.spawn(move || {
                let one = old.communicator(&gpu(rank, 2), 2, &id, rank, LONG).unwrap();
                let error = one.shrink(&[1 - rank]).unwrap_err();
                assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
                let text = error.to_string();
                assert!(
                    text.contains("ncclCommShrink needs NCCL 2.27, 2.21.5 is loaded"),
                    "{text}"
                );
            });
        }
    });
    assert_eq!(fake.live().communicators, 0);
}

#[test]
fn devices_of_one_process_get_an_end_each() {
    let fake = FakeNccl::new();
    let (_, gpus, _, comms) = devices(&fake, 3);
    let places: Vec<_> = comms.iter().map(|one| (one.rank(), one.size())).collect();
    assert_eq!(places, [(0, 3), (1, 3), (2, 3)]);
    assert!(comms.iter().zip(&gpus).all(|(one, gpu)| one.gpu() == gpu));
    drop(comms);
    assert_eq!(fake.live().communicators, 0);
}

#[test]
fn a_communicator_of_somebody_else_is_used_and_left_alone() {
    let fake = FakeNccl::new();
    ranks(&fake, 2, |rank| {
        let raw = rank.communicator.raw();
        // SAFETY: it lives as long, and makes no calls meanwhile.
        let adopted = unsafe { rank.nccl.adopt(&rank.gpu, raw, LONG) }.unwrap();
        assert_eq!((adopted.rank(), adopted.size()), (rank.number(), 2));
        let mut x = rank.buffer(&[rank.number() as i32 + 1]);
        adopted.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
        assert_eq!(x.read(&rank.stream).unwrap(), [3]);
        adopted.abort();
        drop(adopted);
        rank.communicator.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
        rank.world.barrier().unwrap();
        let other = gpu(1 - rank.number(), 2);
        // SAFETY: likewise.
        let text = unsafe { rank.nccl.adopt(&other, raw, LONG) }.unwrap_err().to_string();
        assert!(text.starts_with("adopt: expected a communicator on cuda:"), "{text}");
        // SAFETY: nothing is there to be live.
        let text = unsafe { rank.nccl.adopt(&rank.gpu, 0, LONG) }.unwrap_err().to_string();
        assert_eq!(text, "adopt: expected a communicator of NCCL, got a null pointer");
    });
    assert_eq!(fake.calls("ncclCommAbort"), 0);
}

#[test]
fn memory_and_windows_are_registered_until_they_are_dropped() {
    let fake = FakeNccl::new();
    ranks(&fake, 2, |rank| {
        let comm = &rank.communicator;
        let buffer = rank.buffer(&[rank.number() as u8; 4096]);
        // SAFETY: the buffer outlives both.
        let registered = unsafe { comm.register(buffer.address(), 4096) }.unwrap();
        // SAFETY: likewise, and the ranks synchronise before it goes.
        let window = unsafe { comm.window(buffer.address(), 4096) }.unwrap().unwrap();
        rank.world.barrier().unwrap();
        assert_eq!((fake.live().registrations, fake.live().windows), (2, 2));
        let own = window.peer_address(rank.number(), 64).unwrap();
        assert_eq!(own, Some(buffer.address() + 64));
        let peer = window.peer_address(1 - rank.number(), 0).unwrap().unwrap();
        let pointer = std::ptr::with_exposed_provenance::<u8>(peer as usize);
        // SAFETY: the peer's buffer is mapped in this process too, and lives until the barrier.
        assert_eq!(unsafe { pointer.read_volatile() }, 1 - rank.number() as u8);
        assert_eq!(window.multicast_address(0).unwrap(), None);
        rank.world.barrier().unwrap();
        drop((registered, window));
        rank.world.barrier().unwrap();
        assert_eq!((fake.live().registrations, fake.live().windows), (0, 0));
    });
}

#[test]
fn windows_that_are_not_supported_are_none() {
    let fake = FakeNccl::new();
    fake.windows(false, false, None);
    ranks(&fake, 2, |rank| {
        let buffer = rank.buffer(&[0_u8; 4096]);
        // SAFETY: the buffer outlives it.
        let window = unsafe { rank.communicator.window(buffer.address(), 4096) }.unwrap();
        assert!(window.is_none());
    });
}
