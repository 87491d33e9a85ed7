//! Calls that do not pair up, give up, are interrupted or are left alone: what each rank is told, and what works afterwards.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests stop at the first surprise too"
)]

use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use symmem::{Error, Group, Pool, ReduceOp, World, interruptible};

const SHORT: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(30);
/// Held by tests that count descriptors.
static DESCRIPTORS: Mutex<()> = Mutex::new(());

fn group_with(world: &World, timeout: Duration) -> Group {
    let all: Vec<usize> = (0..world.size()).collect();
    let group = world.subgroup_builder(&all).timeout(timeout).build().unwrap();
    world.barrier().unwrap(); // all have made it, so that the shortest patience is enough
    group.ready().unwrap();
    group
}

fn threads(ranks: usize, body: impl Fn(World) + Sync) {
    World::threads(ranks, body).unwrap();
}

fn out_of_step(result: symmem::Result<()>) {
    assert!(matches!(result, Err(Error::OutOfStep { rank: 0, .. })), "{result:?}");
}

/// One rank gives up its first call; the others make theirs when it is in its second, with other data.
#[test]
fn a_sum_is_never_that_of_another_call() {
    threads(3, |world| {
        let group = group_with(&world, SHORT);
        for len in [1, 6, 1000, 40_000, 300_000] {
            let mut data = vec![100 + world.rank() as u32; len];
            if world.rank() == 0 {
                let late = group.all_reduce(&mut data, ReduceOp::Sum);
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
            }
            world.barrier().unwrap();
            data.fill(200);
            out_of_step(group.all_reduce(&mut data, ReduceOp::Sum));
            out_of_step(group.broadcast(&mut data, 0));
            assert!(data.iter().all(|v| *v == 200));
            group.resync_by(LONG).unwrap();
            group.set_timeout(LONG);
            data.fill(world.rank() as u32);
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|v| *v == 3), "{len}");
            group.set_timeout(SHORT);
            world.barrier().unwrap();
        }
    });
}

/// Rank 0 gives up a call while that still waits for an earlier one, and then makes one that looks the same.
#[test]
fn a_call_that_was_never_reached_is_not_replaced_by_the_next() {
    threads(2, |world| {
        let group = group_with(&world, SHORT);
        let sum = |value: u32| {
            let mut data = [value; 5];
            group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[0])
        };
        if world.rank() == 0 {
            assert!(matches!(group.barrier(), Err(Error::Timeout { .. })));
            assert!(matches!(sum(10), Err(Error::Timeout { .. })));
        }
        world.barrier().unwrap();
        let calls = if world.rank() == 0 { 1 } else { 2 };
        for call in 0..calls {
            let told =
                if call == 0 && world.rank() == 1 { group.barrier() } else { sum(1).map(drop) };
            assert!(matches!(&told, Err(Error::OutOfStep { rank: 0, .. })), "{told:?}");
        }
        group.resync_by(LONG).unwrap();
        group.set_timeout(LONG);
        assert_eq!(sum(3).unwrap(), 6);
    });
}

/// The same where a rank has yet to come to calls that differ.
#[test]
fn a_call_behind_calls_that_differ_is_not_replaced_by_the_next() {
    threads(3, |world| {
        let group = group_with(&world, SHORT);
        let mut data = [1_u32; 5];
        match world.rank() {
            0 => {
                group.set_timeout(LONG);
                assert!(matches!(group.broadcast(&mut data, 0), Err(Error::Mismatch { .. })));
                group.set_timeout(SHORT);
                let e = group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
                assert!(
                    matches!(&e, Error::Timeout { waiting_for, .. } if *waiting_for == [2]),
                    "{e}"
                );
            }
            1 => {
                group.set_timeout(LONG);
                assert!(matches!(group.broadcast(&mut data, 1), Err(Error::Mismatch { .. })));
            }
            _ => {}
        }
        world.barrier().unwrap();
        out_of_step(group.all_reduce(&mut data, ReduceOp::Sum));
        group.resync_by(LONG).unwrap();
        group.set_timeout(LONG);
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3; 5]);
    });
}

/// A barrier or change of phase that gave up so is made again, or nothing else is.
#[test]
fn a_call_that_was_put_off_comes_first() {
    for again in [true, false] {
        threads(2, |world| {
            let group = group_with(&world, LONG);
            let x = world.alloc::<u8>(10).unwrap().rendezvous(&group).unwrap();
            if world.rank() == 0 {
                let late = group.barrier_on(0, SHORT);
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
                group.set_timeout(SHORT);
                let failed = x.share().err().unwrap();
                assert!(matches!(failed.error, Error::Timeout { .. }), "{failed}");
                group.set_timeout(LONG);
                world.barrier().unwrap();
                if again {
                    drop(failed.kept.resume().unwrap());
                    return;
                }
                let x = failed.kept.give_up().unwrap_or_else(|_| panic!("nobody can read it"));
                out_of_step(group.barrier());
                assert_eq!(x.local(), [0; 10]);
            } else {
                world.barrier().unwrap();
                if again {
                    group.barrier().unwrap();
                    drop(x.share().unwrap());
                    return;
                }
                let told = group.barrier();
                if told.is_ok() {
                    out_of_step(x.share().map(drop).map_err(Error::from));
                } else {
                    out_of_step(told);
                }
            }
            group.resync_by(LONG).unwrap();
            group.barrier().unwrap();
        });
    }
}

/// Rank 0 has given up the first call, which turns out to be another than rank 1's. Their second calls still pair up.
#[test]
fn a_disagreement_on_a_call_given_up_does_not_shift_the_next() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        if world.rank() == 0 {
            let late = group.barrier_on(0, SHORT);
            assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        }
        world.barrier().unwrap();
        if world.rank() == 1 {
            let e = group.broadcast(&mut [1], 0).unwrap_err();
            assert!(matches!(e, Error::Mismatch { rank: 0, .. }), "{e}");
        }
        let mut data = [1 + world.rank() as u64];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3]);
        group.barrier().unwrap();
    });
}

/// Lengths, memory and types whose short hashes are equal.
#[test]
fn no_two_calls_are_taken_for_one() {
    threads(2, |world| {
        let mut short = world.alloc::<u8>(1025).unwrap().rendezvous(&world).unwrap();
        let mut long = world.alloc::<u8>(167_545).unwrap().rendezvous(&world).unwrap();
        for _ in 0..3 {
            // The first time in full, later by their numbers.
            short.all_reduce(ReduceOp::Sum).unwrap();
            long.all_reduce(ReduceOp::Sum).unwrap();
            let x = if world.rank() == 0 { &mut short } else { &mut long };
            x.local_mut().fill(7);
            let e = x.all_reduce(ReduceOp::Sum).unwrap_err();
            let lengths = ["1025 elements", "167545 elements"];
            let [ours, other] = [lengths[world.rank()], lengths[1 - world.rank()]];
            let Error::Mismatch { what: "length", ours: o, theirs: t, .. } = &e else {
                panic!("{e}")
            };
            assert_eq!([o.as_str(), t.as_str()], [ours, other]);
            assert!(x.local().iter().all(|v| *v == 7));
        }
        short.all_reduce(ReduceOp::Sum).unwrap();
    });
}

/// More calls than are known by numbers, in an order in which they take each other's places.
#[test]
fn any_number_of_calls_pair_up() {
    threads(2, |world| {
        for round in 0..3 {
            for len in (0..700).chain((0..700).rev()) {
                let mut data = vec![1_u8; len];
                world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|v| *v == 2), "{round} {len}");
            }
            let mut data = vec![1_u8; 100 + world.rank()];
            let e = world.all_reduce(&mut data, ReduceOp::Sum).unwrap_err().to_string();
            assert!(e.contains("on the length: here 10") && e.ends_with("elements"), "{e}");
        }
    });
}

#[test]
fn different_calls_fail_at_once_though_a_rank_has_not_come() {
    threads(3, |world| {
        let group = group_with(&world, LONG);
        let begin = Instant::now();
        match world.rank() {
            0 => {
                let e = group.barrier().unwrap_err();
                assert!(matches!(e, Error::Mismatch { rank: 1, .. }), "{e}");
                assert!(e.to_string().contains("all_reduce of 10 f32, sum, memory: slices"), "{e}");
            }
            1 => {
                let e = group.all_reduce(&mut [1_f32; 10], ReduceOp::Sum).unwrap_err();
                assert!(matches!(e, Error::Mismatch { rank: 0, .. }), "{e}");
            }
            _ => {
                world.wait_signal(0, 0, LONG).unwrap();
                world.wait_signal(1, 0, LONG).unwrap();
                assert!(matches!(group.barrier(), Err(Error::Mismatch { rank: 1, .. })));
            }
        }
        assert!(begin.elapsed() < LONG / 2);
        if world.rank() < 2 {
            world.put_signal(2, 0, LONG).unwrap();
        }
        group.barrier().unwrap();
        let x = world.alloc::<f32>(10).unwrap().rendezvous(&group).unwrap();
        let e = match world.rank() {
            0 => x.open().map(drop).unwrap_err().error,
            _ => group.barrier().unwrap_err(),
        };
        assert!(matches!(e, Error::Mismatch { what: "operation", .. }), "{e}");
        let e = match world.rank() {
            0 => world.alloc::<f32>(10).unwrap().rendezvous(&group).map(drop).unwrap_err().error,
            _ => group.barrier().unwrap_err(),
        };
        assert!(matches!(e, Error::Mismatch { what: "operation", .. }), "{e}");
        group.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_refuses_a_call_is_not_waited_for() {
    threads(3, |world| {
        let group = group_with(&world, LONG);
        let begin = Instant::now();
        let mut data = [1_u16; 61];
        if world.rank() == 1 {
            group.refuse().unwrap();
        } else {
            let e = group.all_reduce(&mut data, ReduceOp::Xor).unwrap_err();
            let Error::Mismatch { what: "operation", rank: 1, theirs, .. } = &e else {
                panic!("{e}")
            };
            assert_eq!(theirs, "refuse");
        }
        assert!(begin.elapsed() < LONG / 2);
        group.refuse().unwrap(); // by all
        group.all_reduce(&mut data, ReduceOp::Xor).unwrap();
        assert_eq!(data, [1; 61]);
    });
}

#[test]
fn a_timeout_says_where_the_missing_ranks_are() {
    threads(3, |world| {
        let group = group_with(&world, LONG);
        group.all_reduce(&mut [1_u16; 9], ReduceOp::Max).unwrap();
        match world.rank() {
            0 => {
                std::thread::sleep(SHORT);
                let e = group.barrier_on(0, 4 * SHORT).unwrap_err();
                let Error::Timeout { waiting_for, doing, .. } = &e else { panic!("{e}") };
                assert_eq!(*waiting_for, [1, 2]);
                assert!(doing[0].starts_with("rank 1 is in wait_signal"), "{doing:?}");
                assert!(doing[0].contains("waiting for rank 0"), "{doing:?}");
                assert!(doing[1].starts_with("rank 2 is outside of the library"), "{doing:?}");
                assert!(doing.iter().all(|d| d.contains("all_reduce of 9 u16, max")), "{doing:?}");
                world.put_signal(1, 3, LONG).unwrap();
                world.put_signal(2, 3, LONG).unwrap();
            }
            1 => world.wait_signal(0, 3, LONG).unwrap(),
            _ => {
                std::thread::sleep(6 * SHORT);
                world.wait_signal(0, 3, LONG).unwrap();
            }
        }
        group.barrier().unwrap();
    });
}

/// Rank 0 has come to the barrier and left the job since; rank 2 is late. Nobody blames rank 0.
#[test]
fn a_rank_that_has_arrived_is_not_missed_when_it_leaves() {
    threads(3, |world| match world.rank() {
        0 => {
            let e = world.barrier_on(0, SHORT).unwrap_err();
            assert!(matches!(e, Error::Timeout { waiting_for, .. } if waiting_for == [2]));
        }
        1 => {
            let e = world.barrier_on(0, 4 * SHORT).unwrap_err();
            assert!(matches!(&e, Error::Timeout { waiting_for, .. } if *waiting_for == [2]), "{e}");
            world.put_signal(2, 0, LONG).unwrap();
            world.barrier().unwrap();
        }
        _ => {
            world.wait_signal(1, 0, LONG).unwrap();
            world.barrier().unwrap();
            let e = world.barrier().unwrap_err();
            let told = matches!(&e, Error::PeerLost { rank: 0 | 1, how, .. } if how == "it left");
            assert!(told, "{e}");
        }
    });
}

/// Whoever leaves after the last barrier must not be taken for lost by those who are still in it. `SYMMEM_JOBS` sets how
/// many jobs there are; a long trial is 40,000 of them while another process keeps one core busy.
#[test]
fn jobs_that_end_in_order_lose_nobody() {
    let set = std::env::var("SYMMEM_JOBS").ok();
    for _ in 0..set.map_or(1000, |jobs| jobs.parse().expect("a number of jobs")) {
        World::threads(8, |world| world.barrier().unwrap()).unwrap();
    }
}

#[test]
fn a_world_is_left_only_when_nothing_of_it_is_alive() {
    threads(2, |world| {
        let x = world.alloc::<u8>(10).unwrap().rendezvous(&world).unwrap().share().unwrap();
        let held = x.peer(1 - world.rank()).unwrap();
        let failed = world.leave().err().unwrap();
        assert!(matches!(failed.error, Error::Usage { op: "leave", .. }), "{failed}");
        assert_eq!(held, [0; 10]);
        let world = failed.kept;
        drop(x);
        let group = world.subgroup(&[0, 1]).unwrap();
        group.barrier().unwrap();
        let world = world.leave().err().unwrap().kept;
        drop(group);
        world.barrier().unwrap();
        world.leave().unwrap();
    });
}

/// Peers may have mapped it although the rendezvous failed here.
#[test]
fn memory_of_a_pool_that_was_offered_to_peers_keeps_its_shape() {
    threads(2, |world| {
        let pool = Pool::new(&world, 1 << 20);
        let x = pool.alloc::<u8>(100 + world.rank()).unwrap();
        let offset = x.offset();
        let failed = x.rendezvous(&world).err().unwrap();
        assert!(matches!(failed.error, Error::Mismatch { what: "size", .. }), "{failed}");
        drop(failed);
        assert_ne!(pool.alloc::<u8>(5000).unwrap().offset(), offset);
        assert_eq!(pool.alloc::<u8>(100 + world.rank()).unwrap().offset(), offset);
    });
}

/// A thread that waits for its turn behind another one's call gives up at its own deadline.
#[test]
fn a_call_behind_that_of_another_thread_keeps_its_deadline() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        if world.rank() == 0 {
            let late = Duration::from_secs(3);
            group.set_timeout(late);
            std::thread::scope(|scope| {
                let first = scope.spawn(|| group.all_reduce(&mut [1.0; 9], ReduceOp::Sum));
                std::thread::sleep(SHORT);
                group.set_timeout(SHORT);
                let begin = Instant::now();
                let calls: [&dyn Fn() -> symmem::Result<()>; 3] = [
                    &|| group.all_reduce(&mut [1.0; 9], ReduceOp::Sum),
                    &|| group.barrier(),
                    &|| Ok(group.alloc::<u8>(1)?.rendezvous(&group).map(drop)?),
                ];
                for call in calls {
                    let e = call().unwrap_err();
                    assert!(
                        matches!(&e, Error::Timeout { waiting_for, .. } if *waiting_for == [0]),
                        "{e}"
                    );
                }
                assert!(begin.elapsed() < late / 2, "{:?}", begin.elapsed());
                assert!(matches!(first.join().unwrap(), Err(Error::Timeout { .. })));
            });
        }
        world.barrier().unwrap();
        group.resync_by(LONG).unwrap();
        group.set_timeout(LONG);
        group.barrier().unwrap();
    });
}

#[test]
fn an_interruption_is_an_error_of_its_own() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        if world.rank() == 0 {
            let e = interruptible(|| true, || group.barrier()).unwrap_err();
            assert!(
                matches!(&e, Error::Interrupted { op: "barrier", waiting_for, .. } if *waiting_for == [1]),
                "{e}"
            );
            let e = interruptible(|| true, || world.wait_signal(1, 0, LONG)).unwrap_err();
            assert!(matches!(e, Error::Interrupted { op: "wait_signal", .. }), "{e}");
            let e =
                interruptible(|| true, || world.subgroup(&[0, 1]).unwrap().ready()).unwrap_err();
            assert!(matches!(e, Error::Interrupted { op: "subgroup", .. }), "{e}");
        }
        world.barrier().unwrap();
        group.barrier().unwrap();
        if world.rank() == 0 {
            let e =
                interruptible(|| true, || group.all_reduce(&mut [1], ReduceOp::Sum)).unwrap_err();
            assert!(matches!(e, Error::Interrupted { op: "all_reduce", .. }), "{e}");
        }
        world.barrier().unwrap();
        group.resync().unwrap();
        group.all_reduce(&mut [1], ReduceOp::Sum).unwrap();
    });
}

#[test]
fn signals_belong_to_their_memory() {
    threads(2, |world| {
        let open = || world.alloc::<u32>(4).unwrap().rendezvous(&world).unwrap().open().unwrap();
        let (x, y) = (open(), open());
        if world.rank() == 0 {
            x.put_signal(1, 0, &[1], 0, LONG).unwrap();
            world.put_signal(1, 1, LONG).unwrap();
            world.wait_signal(1, 1, LONG).unwrap();
            y.put_signal(1, 0, &[2], 0, LONG).unwrap();
        } else {
            world.wait_signal(0, 1, LONG).unwrap();
            let e = y.wait_signal(0, 0, SHORT).unwrap_err();
            assert!(matches!(e, Error::Timeout { .. }), "{e}");
            let e = world.wait_signal(0, 0, SHORT).unwrap_err();
            assert!(matches!(e, Error::Timeout { .. }), "{e}");
            let word = |open: &symmem::Open<u32>| {
                let pad = open.handle().signal_pad();
                pad.words(1).unwrap()[0].load(std::sync::atomic::Ordering::Relaxed)
            };
            assert_eq!((word(&x), word(&y)), (1, 0));
            x.wait_signal(0, 0, LONG).unwrap();
            assert_eq!(word(&x), 0);
            world.put_signal(0, 1, LONG).unwrap();
            y.wait_signal(0, 0, LONG).unwrap();
            let mut got = [0];
            y.get(1, 0, &mut got).unwrap();
            assert_eq!(got, [2]);
        }
        for _ in 0..3 {
            x.handle().signal_pad().barrier(2, LONG).unwrap();
            y.handle().signal_pad().barrier(2, LONG).unwrap();
        }
        // One that gave up goes on: rank 1 takes part in it once.
        if world.rank() == 0 {
            let e = x.handle().signal_pad().barrier(3, SHORT).unwrap_err();
            assert!(matches!(e, Error::Timeout { .. }), "{e}");
        }
        world.barrier().unwrap();
        x.handle().signal_pad().barrier(3, LONG).unwrap();
        let words = x.handle().signal_pad().words(world.rank()).unwrap();
        assert!(words.iter().all(|w| w.load(std::sync::atomic::Ordering::Relaxed) == 0));
        world.barrier().unwrap();
    });
}

/// An alignment beyond all memory gives neither a panic nor an offset that is none.
#[test]
fn huge_alignments_are_refused_by_every_rank() {
    threads(2, |world| {
        let mut x = world.alloc::<f32>(8).unwrap().rendezvous(&world).unwrap();
        let mut splits = world.alloc::<i64>(4).unwrap().rendezvous(&world).unwrap();
        for align in [usize::MAX, usize::MAX / 2 + 2, 1 << 62] {
            splits.local_mut().copy_from_slice(&[1, 0, 0, 1]);
            let mut received = [0; 8];
            let e =
                x.all_to_all_v_2d(2, &mut splits, align, &mut [0.0; 8], &mut received).unwrap_err();
            assert!(matches!(e, Error::Usage { op: "all_to_all_v_2d", .. }), "{e}");
        }
        world.barrier().unwrap();
    });
}

#[test]
fn all_to_all_v_names_the_type_of_its_rows() {
    threads(2, |world| {
        let mut x = world.alloc::<u64>(8).unwrap().rendezvous(&world).unwrap();
        let mut splits = world.alloc::<i64>(2).unwrap().rendezvous(&world).unwrap();
        let e = if world.rank() == 0 {
            world.barrier()
        } else {
            x.all_to_all_v(1, &mut splits, &mut [0; 8], &mut [0; 4])
        };
        let e = e.unwrap_err().to_string();
        assert!(e.contains("all_to_all_v of 2 u64"), "{e}");
    });
}

/// A thread with flush-to-zero gets the bits that all get.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_rank_that_flushes_denormals_gets_the_same_bits() {
    fn set_control(value: u32) {
        // SAFETY: flush-to-zero and denormals-are-zero, or the default.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value) };
    }
    let tiny = f32::from_bits(1);
    let sums = World::threads(2, |world| {
        if world.rank() == 1 {
            set_control(0x9fc0);
        }
        let mut data = vec![tiny; 100];
        world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        let mut x = world.alloc::<f32>(10_000).unwrap().rendezvous(&world).unwrap();
        x.local_mut().fill(tiny);
        x.all_reduce(ReduceOp::Sum).unwrap();
        let bits = (data[0].to_bits(), x.local()[5000].to_bits(), x.local()[1].to_bits());
        set_control(0x1f80);
        bits
    });
    assert_eq!(sums.unwrap(), [(2, 2, 2); 2]);
}

/// What came for a group or a rendezvous that will never be is given back.
#[test]
fn what_peers_offered_in_vain_is_not_kept() {
    let _alone = DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let options = World::builder().backend("host");
    let rounds = Barrier::new(2);
    options
        .threads(2, |world| {
            let group = group_with(&world, Duration::from_millis(2));
            rounds.wait();
            let before = descriptors();
            rounds.wait();
            for _ in 0..100 {
                if world.rank() == 0 {
                    drop(world.subgroup(&[0, 1]).unwrap());
                    let failed = group.alloc::<u8>(10).unwrap().rendezvous(&group).err().unwrap();
                    assert!(matches!(failed.error, Error::Timeout { .. }), "{failed}");
                }
            }
            rounds.wait();
            let kept = descriptors().saturating_sub(before);
            assert!(kept < 20, "{kept} descriptors are left");
            rounds.wait();
            // Rank 0 gives up, rank 1 comes and sends its memory, and both go back in step instead of calling again.
            for _ in 0..40 {
                group.set_timeout(if world.rank() == 0 { Duration::from_millis(2) } else { SHORT });
                if world.rank() == 1 {
                    rounds.wait();
                }
                let offered = group.alloc::<u8>(10).unwrap().rendezvous(&group);
                assert!(offered.is_err());
                drop(offered);
                if world.rank() == 0 {
                    rounds.wait();
                }
                rounds.wait();
                group.resync_by(LONG).unwrap();
            }
            rounds.wait();
            let kept = descriptors().saturating_sub(before);
            assert!(kept < 20, "{kept} descriptors are left");
            rounds.wait();
        })
        .unwrap();
}

/// Rank 0 gives up a rendezvous, rank 1 comes, sends its memory and goes; rank 0 keeps the groups that it shrinks.
#[test]
fn what_a_rank_offered_before_it_went_is_not_kept() {
    const GROUPS: usize = 40;
    let _alone = DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let options = World::builder().backend("host");
    let rounds = Barrier::new(2);
    options
        .threads(2, |world| {
            let short = Duration::from_millis(2);
            let groups: Vec<Group> = (0..GROUPS).map(|_| group_with(&world, short)).collect();
            rounds.wait();
            let before = descriptors();
            rounds.wait();
            for group in &groups {
                if world.rank() == 1 {
                    rounds.wait();
                }
                assert!(group.alloc::<u8>(10).unwrap().rendezvous(group).is_err());
                if world.rank() == 0 {
                    rounds.wait();
                }
            }
            rounds.wait();
            if world.rank() == 1 {
                return;
            }
            world.set_timeout(LONG);
            assert!(matches!(world.barrier(), Err(Error::PeerLost { rank: 1, .. })));
            let offered = descriptors().saturating_sub(before);
            assert!(offered > GROUPS / 2, "the test itself: only {offered} were sent"); // other tests have some, too
            let smaller: Vec<Group> = groups.iter().map(|g| g.shrink_by(LONG).unwrap()).collect();
            assert!(smaller.iter().all(|group| group.size() == 1));
            let kept = descriptors().saturating_sub(before);
            assert!(kept < 20, "{kept} descriptors are left");
        })
        .unwrap();
}

/// Rank 0 gives up its first call before rank 1 has created the group; its second is not taken for the first.
#[test]
fn a_call_that_gave_up_before_its_group_was_formed_is_not_replaced_by_the_next() {
    threads(2, |world| {
        if world.rank() == 0 {
            let group = world.subgroup_builder(&[0, 1]).timeout(SHORT).build().unwrap();
            let e = group.all_reduce(&mut [1], ReduceOp::Sum).unwrap_err();
            assert!(matches!(e, Error::Timeout { op: "subgroup", .. }), "{e}");
            world.barrier().unwrap();
            group.set_timeout(LONG);
            out_of_step(group.all_reduce(&mut [2], ReduceOp::Sum));
            group.resync().unwrap();
            let mut data = [3];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3 + 30]);
        } else {
            world.barrier().unwrap();
            let group = world.subgroup_builder(&[0, 1]).timeout(SHORT).build().unwrap();
            group.set_timeout(LONG);
            out_of_step(group.all_reduce(&mut [10], ReduceOp::Sum));
            group.resync().unwrap();
            let mut data = [30];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3 + 30]);
        }
    });
}

/// Rank 1 waits for rank 0's part of a rendezvous that rank 0 has given up; the resync of rank 0 ends that.
#[test]
fn a_resync_ends_a_rendezvous_that_only_some_are_in() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        let x = group.alloc::<u8>(10).unwrap();
        let begin = Instant::now();
        if world.rank() == 0 {
            group.set_timeout(SHORT);
            let failed = x.rendezvous(&group).err().unwrap();
            assert!(matches!(failed.error, Error::Timeout { .. }), "{failed}");
            world.barrier().unwrap();
            std::thread::sleep(SHORT); // rank 1 is in it by now
            group.resync_by(LONG).unwrap();
        } else {
            world.barrier().unwrap();
            let failed = x.rendezvous(&group).err().unwrap();
            assert!(matches!(failed.error, Error::OutOfStep { rank: 0, .. }), "{failed}");
            group.resync_by(LONG).unwrap();
        }
        assert!(begin.elapsed() < LONG / 2);
        group.set_timeout(LONG);
        group
            .alloc::<u8>(10)
            .unwrap()
            .rendezvous(&group)
            .unwrap()
            .share()
            .unwrap()
            .release()
            .unwrap();
    });
}

#[test]
fn barriers_over_a_pad_on_different_channels_do_not_wait_for_each_other() {
    threads(2, |world| {
        let x = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
        let pad = || x.handle().signal_pad();
        let first = world.rank();
        std::thread::scope(|scope| {
            scope.spawn(|| pad().barrier(first, LONG).unwrap());
            std::thread::sleep(SHORT);
            pad().barrier(1 - first, LONG).unwrap();
        });
    });
}
