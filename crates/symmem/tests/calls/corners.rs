//! Corners in which a call could return wrong data.

use super::super::*;

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

/// Flush to zero, denormals are zero.
#[cfg(target_arch = "x86_64")]
const FLUSHING: u32 = 0x9fc0;

#[cfg(target_arch = "x86_64")]
fn set_control(value: u32) {
    // SAFETY: flush-to-zero and denormals-are-zero, or the default.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value) };
}

/// The control register without the flags of exceptions that were raised.
#[cfg(target_arch = "x86_64")]
fn control() -> u32 {
    let mut value = 0_u32;
    // SAFETY: stores the register into `value`.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value) };
    value & !0x3f
}

/// A thread with flush-to-zero gets the bits that all get, and keeps its setting.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_rank_that_flushes_denormals_gets_the_same_bits() {
    let tiny = f32::from_bits(1);
    let sums = World::threads(2, |world| {
        if world.rank() == 1 {
            set_control(FLUSHING);
        }
        let before = control();
        let mut data = vec![tiny; 100];
        world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(control(), before);
        let mut x = world.alloc::<f32>(10_000).unwrap().rendezvous(&world).unwrap();
        x.local_mut().fill(tiny);
        x.all_reduce(ReduceOp::Sum).unwrap();
        assert_eq!(control(), before);
        let mut out = vec![0.0; 10_000];
        x.reduce_scatter(ReduceOp::Sum, &mut out[..5000]).unwrap();
        assert_eq!(control(), before);
        let bits = (data[0].to_bits(), x.local()[5000].to_bits(), out[1].to_bits());
        set_control(0x1f80);
        bits
    });
    assert_eq!(sums.unwrap(), [(2, 2, 4); 2]);
}

/// What runs while a rank waits has the caller's environment, and may change it; the call computes as ever.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_wait_that_runs_the_callers_code_leaves_it_its_environment() {
    thread_local! {
        static SEEN: std::cell::RefCell<Vec<u32>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    /// Denormals are zero, but results are not flushed.
    const CHANGED: u32 = 0x1fc0;
    fn polled() -> bool {
        SEEN.with_borrow_mut(|seen| seen.push(control()));
        set_control(CHANGED);
        false
    }
    let tiny = f32::from_bits(1);
    let sums = World::threads(2, |world| {
        let mut data = vec![tiny; 100];
        if world.rank() == 0 {
            std::thread::sleep(6 * SHORT);
            world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        } else {
            set_control(FLUSHING);
            interruptible(polled, || world.all_reduce(&mut data, ReduceOp::Sum)).unwrap();
            let seen = SEEN.take();
            assert_eq!(seen.first(), Some(&FLUSHING));
            assert!(seen.iter().skip(1).all(|control| *control == CHANGED), "{seen:x?}");
            assert_eq!(control(), CHANGED);
            set_control(0x1f80);
        }
        data[0].to_bits()
    });
    assert_eq!(sums.unwrap(), [2; 2]);
}

/// The callback of `interruptible` panics while rank 1 has not come to a call. Rank 0 has: what it does next is not part of that.
#[test]
fn a_panic_in_a_wait_gives_the_call_up() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    fn caught(call: impl FnOnce() -> symmem::Result<()>) {
        let call = AssertUnwindSafe(|| interruptible(|| panic!("by design"), call));
        catch_unwind(call).unwrap_err();
    }
    threads(2, |world| {
        let group = group_with(&world, LONG);
        let mut x = group.alloc::<u32>(1 << 18).unwrap().rendezvous(&group).unwrap();
        let mut data = [1_u32; 9];
        for on_memory in [true, false] {
            let mut sum = || match on_memory {
                true => x.all_reduce(ReduceOp::Sum),
                false => group.all_reduce(&mut data, ReduceOp::Sum),
            };
            if world.rank() == 0 {
                caught(&mut sum);
                world.barrier().unwrap();
            } else {
                world.barrier().unwrap();
                out_of_step(sum());
            }
            // Rank 1 could be working on it.
            assert!(!on_memory || world.rank() == 1 || x.local().is_empty());
            out_of_step(group.barrier());
            group.resync().unwrap();
            assert_eq!(x.local().len(), 1 << 18);
        }
        // A call that waits for its turn, and one that waits for its group.
        if world.rank() == 0 {
            std::thread::scope(|scope| {
                let first = scope.spawn(|| group.barrier());
                std::thread::sleep(SHORT);
                caught(|| group.all_reduce(&mut data, ReduceOp::Sum));
                world.barrier().unwrap();
                out_of_step(first.join().unwrap());
            });
        } else {
            world.barrier().unwrap();
            out_of_step(group.barrier());
        }
        group.resync().unwrap();
        if world.rank() == 0 {
            let new = world.subgroup(&[0, 1]).unwrap();
            caught(|| new.all_reduce(&mut data, ReduceOp::Sum));
            world.barrier().unwrap();
            out_of_step(new.all_reduce(&mut data, ReduceOp::Sum));
        } else {
            world.barrier().unwrap();
            let new = world.subgroup(&[0, 1]).unwrap();
            out_of_step(new.all_reduce(&mut data, ReduceOp::Sum));
        }
        world.barrier().unwrap();
    });
}

#[test]
fn what_runs_while_a_rank_waits_may_make_calls_itself() {
    thread_local! {
        static OWN: std::cell::RefCell<Option<Group>> = const { std::cell::RefCell::new(None) };
        static MADE: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }
    fn polled() -> bool {
        OWN.with_borrow(|own| own.as_ref().unwrap().subgroup(&[0]).unwrap().ready().unwrap());
        MADE.set(MADE.get() + 1);
        false
    }
    threads(2, |world| {
        if world.rank() == 0 {
            world.store().wait(&["polled"], LONG.into()).unwrap();
            return world.subgroup(&[0, 1]).unwrap().barrier().unwrap();
        }
        OWN.set(Some(world.subgroup(&[1]).unwrap()));
        let group = world.subgroup(&[0, 1]).unwrap();
        group.set_timeout(6 * SHORT);
        let late = interruptible(polled, || group.ready()).unwrap_err();
        assert!(matches!(late, Error::Timeout { .. }), "{late}");
        OWN.set(None);
        group.set_timeout(LONG);
        assert!(MADE.get() > 0);
        world.store().set("polled", b"").unwrap();
        group.barrier().unwrap();
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
