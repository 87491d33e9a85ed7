//! What the phase of one-sided access promises.

use symmem::{Atomic, Error, Number, Symmetric, World};

use super::{SHORT, SOON, next, part_of, previous};

fn zeros<T: Number>(world: &World, len: usize) -> Symmetric<T> {
    world.alloc::<T>(len).unwrap().rendezvous(world).unwrap()
}

/// A value in the pad shows the data that it was set after, and stays until the next is set.
pub fn values_in_the_pad_are_set_and_awaited(world: World) {
    let open = zeros::<u64>(&world, 100).open().unwrap();
    let own = world.rank();
    let mut got = vec![0; 100];
    for round in 1..50_u32 {
        open.put_value(next(&world), 0, &[u64::from(round); 100], 2, round).unwrap();
        for _ in 0..2 {
            open.wait_value(previous(&world), 2, round, SOON).unwrap();
        }
        open.get(own, 0, &mut got).unwrap();
        assert!(got.iter().all(|v| *v == u64::from(round)));
        // Read: the next may come. Values may skip and repeat.
        open.handle().signal_pad().set(previous(&world), 3, 1000 * round).unwrap();
        open.wait_value(next(&world), 3, 1000 * round, SOON).unwrap();
    }
    let e = open.wait_value(previous(&world), 2, 50, SHORT).unwrap_err();
    assert!(
        matches!(e, Error::Timeout { op: "signal_pad.wait_value", channel: Some(2), .. }),
        "{e}"
    );
    let e = open.put_value(world.size(), 0, &[], 2, 1).unwrap_err().to_string();
    assert!(e.contains("a rank in [0"), "{e}");
    open.close().unwrap();
}

/// Puts that race leave whole elements, of every size.
pub fn elements_are_never_torn(world: World) {
    fn race<T: Number>(world: &World, value: impl Fn(usize) -> T) {
        let open = zeros::<T>(world, 500).open().unwrap();
        let whole =
            |v: &T| (0..world.size()).any(|r| format!("{v:?}") == format!("{:?}", value(r)));
        let data = vec![value(world.rank()); 500];
        let mut got = data.clone();
        for _ in 0..20 {
            open.put(0, 0, &data).unwrap();
            open.get(0, 0, &mut got).unwrap();
            assert!(got.iter().all(whole));
        }
        let x = open.close().unwrap();
        assert!(world.rank() != 0 || x.local().iter().all(whole));
    }
    race::<u8>(&world, |r| [0x00, 0xff, 0x55][r % 3]);
    race::<i16>(&world, |r| [0, -1, 0x5555][r % 3]);
    race::<u32>(&world, |r| [0, u32::MAX, 0x5555_5555][r % 3]);
    race::<i64>(&world, |r| [0, -1, 0x5555_5555_5555_5555][r % 3]);
}

/// A released word shows what was put before it; fills reach peers; both are checked.
pub fn words_are_filled_and_written_at_peers(world: World) {
    let open = zeros::<u32>(&world, 64).open().unwrap();
    let (to, own) = (next(&world), world.rank());
    open.memset32(to, 32, 7, 16).unwrap();
    open.write_value32(to, 0, 1).unwrap();
    while open.read_value32(own, 0).unwrap() == 0 {
        world.check().unwrap();
        std::thread::yield_now();
    }
    let mut got = [0; 18];
    open.get(own, 31, &mut got).unwrap();
    assert!(got[0] == 0 && got[1..17].iter().all(|w| *w == 7) && got[17] == 0);
    let e = open.memset32(to, 60, 1, 5).unwrap_err().to_string();
    assert!(e.contains("offset + count (65) exceeded the numel of the input (64)"), "{e}");
    let e = open.write_value32(to, 64, 1).unwrap_err().to_string();
    assert!(e.contains("exceeded the numel of the input (64)"), "{e}");
    open.close().unwrap();
}

/// Additions and exchanges of all ranks on one element all count, and what was written before them is seen after.
pub fn atomics_of_all_ranks_count(world: World) {
    fn count<T: Atomic + PartialEq + From<bool>>(world: &World, zero: T, to: impl Fn(usize) -> T) {
        let (n, own) = (world.size(), world.rank());
        let open = zeros::<T>(world, 3).open().unwrap();
        let drawn: Vec<T> =
            (0..100).map(|_| open.fetch_add(0, 1, T::from(true)).unwrap()).collect();
        world.barrier().unwrap();
        let mut total = [zero];
        open.get(0, 1, &mut total).unwrap();
        assert!(total == [to(100 * n)], "{total:?}");
        let mut all = vec![zero; 100 * n];
        world.all_gather(&drawn, &mut all).unwrap();
        assert!((0..100 * n).all(|i| all.contains(&to(i))), "each was drawn once");
        // A lock around a plain counter.
        for _ in 0..50 {
            while open.compare_swap(0, 0, zero, to(own + 1)).unwrap() != zero {
                world.check().unwrap();
                std::thread::yield_now();
            }
            let mut inside = [zero];
            open.get(0, 2, &mut inside).unwrap();
            let next = (0..50 * n).find(|&i| to(i) == inside[0]).unwrap() + 1;
            open.put(0, 2, &[to(next)]).unwrap();
            assert!(open.compare_swap(0, 0, to(own + 1), zero).unwrap() == to(own + 1));
        }
        let x = open.close().unwrap();
        assert!(own != 0 || x.local()[2] == to(50 * n));
    }
    count::<u32>(&world, 0, |i| i as u32);
    count::<i32>(&world, 0, |i| i as i32);
    count::<u64>(&world, 0, |i| i as u64);
    count::<i64>(&world, 0, |i| i as i64);
    let open = zeros::<u32>(&world, 3).open().unwrap();
    let e = open.fetch_add(0, 3, 1).unwrap_err().to_string();
    assert!(e.contains("fetch_add: expected elements within the 3 of rank 0, got 1 at 3"), "{e}");
    let e = open.compare_swap(world.size(), 0, 1, 1).unwrap_err().to_string();
    assert!(e.contains("compare_swap: expected a rank in [0"), "{e}");
    open.close().unwrap();
}

/// Ranks that close different memory stay in the phase.
pub fn closing_different_memory_is_told_to_every_rank(world: World) {
    let (x, y) = (zeros::<f32>(&world, 10), zeros::<f32>(&world, 10));
    let (x, y) = (x.open().unwrap(), y.open().unwrap());
    let (first, second) = if world.rank() == 0 { (x, y) } else { (y, x) };
    let failed = first.close().err().unwrap();
    assert!(matches!(failed.error, Error::Mismatch { op: "close", .. }), "{}", failed.error);
    let first = failed.kept.reopen().unwrap();
    first.put(next(&world), 5, &[2.0]).unwrap();
    let (x, y) = if world.rank() == 0 { (first, second) } else { (second, first) };
    x.close().unwrap();
    y.put(world.rank(), 6, &[3.0]).unwrap();
    let own = y.give_up().unwrap();
    assert_eq!(own.local()[6], 3.0);
    let own = own.rendezvous(&world).unwrap();
    assert_eq!(own.local()[6], 3.0);
}

/// A rank that leaves the phase alone has all elements of its part, of any size and number, and can bring them again.
pub fn giving_up_leaves_a_copy_of_every_element(world: World) {
    fn check<T: Number + PartialEq + Default>(
        world: &World,
        len: usize,
        value: impl Fn(usize) -> T,
    ) {
        let all: Vec<T> = (0..len).map(|i| value(i * 7 + world.rank())).collect();
        let mut x = world.alloc::<T>(len).unwrap().rendezvous(world).unwrap();
        x.local_mut().copy_from_slice(&all);
        let own = x.open().unwrap().give_up().unwrap();
        assert_eq!(own.local(), all);
        let shared = own.rendezvous(world).unwrap().share().unwrap();
        assert_eq!(shared.local(), all);
        let theirs: Vec<T> = (0..len).map(|i| value(i * 7)).collect();
        assert_eq!(part_of(&shared, 0), theirs);
        shared.release().unwrap();
    }
    for len in [0, 1, 63, 10_001] {
        check(&world, len, |i| i as u8);
        check(&world, len, |i| i as i16);
        check(&world, len, |i| i as f32);
        check(&world, len, |i| i as f64);
    }
}
