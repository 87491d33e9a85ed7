//! Parts of one allocation, as languages without types for phases use them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at the first surprise")]

use std::time::Duration;

use symmem::{Algorithm, DType, Error, Handle, ReduceOp, Symmetric, World};

/// 4 KiB of bytes of every rank of the world, by their address.
fn bytes(world: &World) -> (symmem::Buffer<u8>, Handle) {
    let buffer = world.alloc::<u8>(4096).unwrap();
    let address = buffer.local().as_ptr() as usize;
    let handle = world.rendezvous_at(address, DType::U8).unwrap().unwrap();
    (buffer, handle)
}

fn part<T: symmem::Element>(handle: &Handle, offset: usize, len: usize) -> Symmetric<T> {
    // SAFETY: these tests touch the memory through such values only.
    unsafe { handle.part(offset, len) }.unwrap()
}

#[test]
fn parts_of_any_type_are_reduced_and_nothing_beside_them() {
    World::threads(3, |world| {
        let (_buffer, handle) = bytes(&world);
        let mut whole = part::<u8>(&handle, 0, 4096);
        whole.local_mut().fill(1);
        for algorithm in [Algorithm::Staged, Algorithm::OneShot, Algorithm::TwoShot] {
            let mut floats = part::<f32>(&handle, 64, 16);
            floats.local_mut().fill(2.5);
            floats.all_reduce_with(ReduceOp::Sum, algorithm).unwrap();
            assert_eq!(floats.local(), [7.5; 16]);
            let mut numbers = part::<i64>(&handle, 256, 3);
            numbers.local_mut().fill(world.rank() as i64);
            numbers.all_reduce_with(ReduceOp::Max, algorithm).unwrap();
            assert_eq!(numbers.local(), [2; 3]);
        }
        let untouched = whole.local().iter().filter(|byte| **byte == 1).count();
        assert_eq!(untouched, 4096 - 64 - 24);
    })
    .unwrap();
}

#[test]
fn ranks_that_take_different_parts_are_told() {
    World::threads(2, |world| {
        let (_buffer, handle) = bytes(&world);
        for algorithm in [Algorithm::Staged, Algorithm::TwoShot] {
            let mut own = part::<f32>(&handle, 64 * world.rank(), 16);
            let reduced = own.all_reduce_with(ReduceOp::Sum, algorithm);
            let Err(Error::Mismatch { ours, theirs, .. }) = reduced else { panic!("{reduced:?}") };
            let places = ["that of rendezvous 1", "that of rendezvous 1 from byte 64"];
            assert_eq!([ours, theirs], [places[world.rank()], places[1 - world.rank()]]);
        }
        part::<f32>(&handle, 64, 16).all_reduce(ReduceOp::Sum).unwrap();
    })
    .unwrap();
}

#[test]
fn parts_beyond_the_memory_or_across_elements_are_refused() {
    World::threads(1, |world| {
        let (_buffer, handle) = bytes(&world);
        for (offset, len) in [(0, 1025), (4096, 1), (4097, 0), (2, 1), (usize::MAX, 1)] {
            // SAFETY: refused before anything is touched.
            let refused = unsafe { handle.part::<f32>(offset, len) }.unwrap_err();
            assert!(refused.to_string().contains("aligned elements within the 4096"), "{refused}");
        }
        assert!(part::<f32>(&handle, 4096, 0).is_empty());
    })
    .unwrap();
}

#[test]
fn after_a_failure_the_memory_goes_on_once_the_group_is_in_step() {
    World::threads(2, |world| {
        let (buffer, handle) = bytes(&world);
        world.set_timeout(Duration::from_millis(50));
        let reduce = |handle: &Handle| {
            part::<f32>(handle, 0, 16).all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot)
        };
        if world.rank() == 0 {
            let late = reduce(&handle);
            assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
            world.put_signal(1, 0, Duration::from_secs(30)).unwrap();
        } else {
            world.wait_signal(0, 0, Duration::from_secs(30)).unwrap();
        }
        world.set_timeout(Duration::from_secs(30));
        let late = reduce(&handle);
        assert!(matches!(late, Err(Error::OutOfStep { rank: 0, .. })), "{late:?}");
        world.resync().unwrap();
        reduce(&handle).unwrap();
        let survivors = world.shrink().unwrap();
        let address = buffer.local().as_ptr() as usize;
        let handle = survivors.rendezvous_at(address, DType::U8).unwrap().unwrap();
        reduce(&handle).unwrap();
    })
    .unwrap();
}

#[test]
fn a_group_waits_as_long_as_it_was_told_last() {
    World::threads(2, |world| {
        let (long, peer) = (Duration::from_secs(30), 1 - world.rank());
        world.set_timeout(Duration::from_millis(10));
        if world.rank() == 0 {
            assert!(matches!(world.barrier(), Err(Error::Timeout { .. })));
            world.put_signal(peer, 0, long).unwrap();
        } else {
            world.wait_signal(peer, 0, long).unwrap();
        }
        world.set_timeout(Duration::ZERO);
        assert_eq!(world.deadline(), symmem::Deadline::NEVER);
        world.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn an_allocation_has_the_pad_it_was_given() {
    World::threads(2, |world| {
        let own = world.alloc_with_pad::<f32>(100, 64).unwrap().rendezvous(&world).unwrap();
        assert_eq!(own.handle().signal_pad_size(), 64);
        assert!(matches!(world.alloc_with_pad::<f32>(1, 63), Err(Error::Usage { .. })));
        let differing = world.alloc_with_pad::<f32>(1, 64 + 64 * world.rank()).unwrap();
        let refused = differing.rendezvous(&world).map_err(Error::from);
        assert!(matches!(refused, Err(Error::Mismatch { what: "signal pad size", .. })));
    })
    .unwrap();
}
