use std::sync::Arc;

use super::*;
use crate::group::World;
use crate::sync::Ordering;
use crate::sync::atomic::AtomicBool;

const LEN: usize = 40_000;

fn registered(world: &World, len: usize) -> (Buffer<u8>, Arc<Registered>, &'static mut [f32]) {
    let buffer = world.alloc::<u8>(4 * len).unwrap();
    let mark = Registered::mark(&buffer);
    let first = buffer.local().as_ptr().cast_mut().cast::<f32>();
    // SAFETY: zeroed, aligned, and used by one thread as long as the buffer lives.
    let data = unsafe { std::slice::from_raw_parts_mut(first, len) };
    (buffer, mark, data)
}

fn fill(data: &mut [f32], rank: usize, step: usize) {
    for (i, x) in data.iter_mut().enumerate() {
        *x = ((i * 7 + rank * 13 + step * 3) % 101) as f32 * 0.37;
    }
}

/// What all ranks' data are in ordinary memory.
fn reduced(world: &World, data: &[f32]) -> Vec<f32> {
    let mut copy = data.to_vec();
    world.all_reduce(&mut copy, ReduceOp::Sum).unwrap();
    copy
}

#[test]
fn memory_that_ranks_have_allocated_in_any_order_is_read_in_place() {
    World::threads(3, |world| {
        let registrations = Registrations::new(&world);
        let mut blocks: Vec<_> = (0..3).map(|_| registered(&world, LEN)).collect();
        // Each rank begins with another block, and with another offset.
        for step in 0..6 {
            let which = (step * (world.rank() + 1) + world.rank()) % 3;
            let begin = 8 * world.rank();
            let data = &mut blocks[which].2[begin..begin + LEN - 100];
            fill(data, world.rank(), step);
            let expected = reduced(&world, data);
            registrations.all_reduce(data, ReduceOp::Sum).unwrap();
            assert_eq!(data, expected);
        }
        assert!(registrations.mapped() > 0 && registrations.mapped() <= 9);
    })
    .unwrap();
}

#[test]
fn ranks_that_differ_in_their_memory_get_the_right_result_all_the_same() {
    World::threads(2, |world| {
        let registrations = Registrations::new(&world);
        let (_kept, _mark, registered) = registered(&world, LEN);
        let mut ordinary = vec![0_f32; LEN];
        for step in 0..8 {
            let is_registered = (step >> world.rank()) & 1 == 1;
            let data = if is_registered { &mut *registered } else { &mut ordinary[..] };
            fill(data, world.rank(), step);
            let expected = reduced(&world, data);
            registrations.all_reduce(data, ReduceOp::Sum).unwrap();
            assert_eq!(data, expected);
        }
        assert_eq!(registrations.mapped(), 1);
    })
    .unwrap();
}

#[test]
fn allocations_of_different_sizes_are_not_mapped_and_reduced_all_the_same() {
    World::threads(2, |world| {
        let registrations = Registrations::new(&world);
        let (_kept, _mark, data) = registered(&world, LEN + 1000 * world.rank());
        let data = &mut data[..LEN];
        fill(data, world.rank(), 0);
        let expected = reduced(&world, data);
        registrations.all_reduce(data, ReduceOp::Sum).unwrap();
        assert_eq!((&*data, registrations.mapped()), (&expected[..], 0));
    })
    .unwrap();
}

#[test]
fn what_was_not_marked_is_left_alone() {
    World::threads(2, |world| {
        let registrations = Registrations::new(&world);
        let mut buffer = world.alloc::<f32>(LEN).unwrap();
        fill(buffer.local_mut(), world.rank(), 0);
        let expected = reduced(&world, buffer.local());
        registrations.all_reduce(buffer.local_mut(), ReduceOp::Sum).unwrap();
        assert_eq!((buffer.local(), registrations.mapped()), (&expected[..], 0));
    })
    .unwrap();
}

#[test]
fn data_move_in_place_and_elsewhere() {
    World::threads(3, |world| {
        let (registrations, rank, size) = (Registrations::new(&world), world.rank(), world.size());
        let (_kept, _mark, whole) = registered(&world, size * LEN);
        for is_registered in [true, false] {
            let mut ordinary = vec![0_f32; size * LEN];
            let whole = if is_registered { &mut *whole } else { &mut ordinary[..] };
            let own = &mut whole[rank * LEN..(rank + 1) * LEN];
            fill(own, rank, 1);
            let mut expected = vec![0_f32; size * LEN];
            world.all_gather(own, &mut expected).unwrap();
            let (input, out) = (own.as_ptr(), whole.as_mut_ptr());
            // SAFETY: the rank's own part of the output.
            unsafe { registrations.all_gather(input, LEN, out) }.unwrap();
            assert_eq!(whole, expected);
            fill(whole, rank, 2);
            let mut sum = vec![0_f32; LEN];
            world.reduce_scatter(whole, ReduceOp::Sum, &mut sum).unwrap();
            let out = whole[rank * LEN..].as_mut_ptr();
            // SAFETY: the rank's own part of the input.
            unsafe {
                registrations.reduce_scatter(whole.as_ptr(), whole.len(), ReduceOp::Sum, out)
            }
            .unwrap();
            assert_eq!(&whole[rank * LEN..(rank + 1) * LEN], sum);
            for root in 0..size {
                fill(whole, rank, 3);
                let mut expected = whole.to_vec();
                world.broadcast(&mut expected, root).unwrap();
                registrations.broadcast(whole, root).unwrap();
                assert_eq!(whole, expected);
            }
        }
        assert_eq!(registrations.mapped(), 1);
    })
    .unwrap();
}

#[test]
fn empty_arrays_may_be_at_null() {
    World::threads(2, |world| {
        let registrations = Registrations::new(&world);
        let (input, out) = (std::ptr::null::<f32>(), std::ptr::null_mut());
        // SAFETY: there are no elements.
        unsafe { registrations.all_gather(input, 0, out) }.unwrap();
        // SAFETY: as above.
        unsafe { registrations.reduce_scatter(input, 0, ReduceOp::Sum, out) }.unwrap();
    })
    .unwrap();
}

#[test]
fn a_rank_that_has_closed_its_places_goes_on_with_the_others() {
    World::threads(2, |world| {
        let registrations = Registrations::new(&world);
        let (_kept, _mark, data) = registered(&world, LEN);
        for step in 0..4 {
            if step == 2 && world.rank() == 1 {
                registrations.close();
            }
            fill(data, world.rank(), step);
            let expected = reduced(&world, data);
            registrations.all_reduce(data, ReduceOp::Sum).unwrap();
            assert_eq!(data, expected);
        }
    })
    .unwrap();
}

#[test]
fn calls_that_differ_are_a_mismatch_on_all_ranks() {
    World::threads(2, |world| {
        let registrations = Registrations::new(&world);
        let (_kept, _mark, data) = registered(&world, LEN);
        let data = &mut data[..LEN - 100 * world.rank()];
        let failed = registrations.all_reduce(data, ReduceOp::Sum).unwrap_err();
        assert!(matches!(failed, Error::Mismatch { what: "length", .. }), "{failed}");
        // One of them does not ask.
        let failed = match world.rank() {
            0 => registrations.all_reduce(&mut data[..LEN / 2], ReduceOp::Sum),
            _ => world.all_reduce(&mut data[..LEN / 2], ReduceOp::Sum),
        };
        assert!(matches!(failed, Err(Error::Mismatch { op: "all_reduce", .. })));
        fill(data, 0, 0);
        let data = &mut data[..LEN - 100];
        registrations.all_reduce(data, ReduceOp::Sum).unwrap();
        assert_eq!(data[1], 2.0 * 7.0 * 0.37);
    })
    .unwrap();
}

#[test]
fn what_a_rank_writes_after_it_gave_up_is_in_no_result() {
    let gave_up = AtomicBool::new(false);
    World::threads(2, |world| {
        let registrations = Registrations::new(&world);
        let (_kept, _mark, data) = registered(&world, LEN);
        let call = call(const { Op::of("all_gather") }, DType::F32, LEN);
        let first = data.as_ptr().cast();
        let (mut running, parts) = registrations.agree(&call, first, 4 * LEN, None).unwrap();
        assert!(parts.is_some(), "all data lie in memory of the group");
        if world.rank() == 0 {
            // It has come to the end of the call, and ends its wait there.
            let ended = crate::interrupt::interruptible(|| true, || finish(&mut running));
            assert!(matches!(ended, Err(Error::Interrupted { .. })), "{ended:?}");
            drop(running);
            data.fill(2.0); // its memory is its own again
            gave_up.store(true, Ordering::Release);
        } else {
            // Its peer is reading all the time.
            while !gave_up.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let ended = finish(&mut running);
            assert!(matches!(ended, Err(Error::OutOfStep { rank: 0, .. })), "{ended:?}");
            drop(running);
        }
        world.resync().unwrap();
        registrations.all_reduce(data, ReduceOp::Sum).unwrap();
    })
    .unwrap();
}

#[test]
fn all_ranks_decide_alike() {
    let known = |number: u64| Location { which: number + 1, offset: 0, size: 8 };
    let new = Location { which: NEW, offset: 0, size: 8 };
    assert_eq!(route(&[known(1), known(2)], None), Route::ReadInPlace);
    assert_eq!(route(&[known(1), new], None), Route::Map);
    assert_eq!(route(&[Location { size: 9, ..known(1) }, new], None), Route::Stage);
    assert_eq!(route(&[Location::ORDINARY, new], None), Route::Stage);
    assert_eq!(route(&[Location::ORDINARY, known(1)], Some(1)), Route::ReadInPlace);
    assert_eq!(route(&[Location::ORDINARY, new], Some(1)), Route::Stage);
    assert_eq!(route(&[known(3), new], Some(1)), Route::Map);
}
