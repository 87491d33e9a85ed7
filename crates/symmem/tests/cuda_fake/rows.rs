//! Launches of the all-to-all with splits: two kernels, in one stream, with one plan between them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use symmem::cuda::{Buffer, Gpu, Symmetric};
use symmem::{Error, World};
use symmem_sys::cuda::fake::{Fake, Launched};

use super::{Group, declared, drivers, on, ranks, word};

/// Numbers by which kernels say what they are about.
const ALL_TO_ALL_V: u32 = 7;
const ALL_TO_ALL_V_2D: u32 = 15;
const ALL_TO_ALL_V_2D_OFFSET: u32 = 16;

const OUT: u32 = 77;
const RECEIVED: u32 = 88;

type Seen = Arc<Mutex<Vec<Launched>>>;

/// Has launches noted with their parameters, and the first words of what they write set.
fn noting(driver: &Fake) -> Seen {
    let seen = Seen::default();
    for kernel in ["all_to_all_v_plan", "all_to_all_v"] {
        let into = seen.clone();
        driver.kernel(kernel, &declared("rows", kernel), move |launched| {
            if launched.function == "all_to_all_v" {
                word(launched.u64(2).unwrap()).store(OUT, Ordering::Relaxed);
                word(launched.u64(3).unwrap()).store(RECEIVED, Ordering::Relaxed);
            }
            into.lock().unwrap().push(launched.clone());
        });
    }
    seen
}

struct Memory {
    x: Symmetric<u32>,
    splits: Symmetric<i64>,
    out: Buffer<u32>,
    received: Buffer<i64>,
}

impl Memory {
    fn new(world: &World, gpu: &Gpu, [x, splits, out, received]: [usize; 4]) -> Self {
        Self {
            x: gpu.alloc(world, x).unwrap().rendezvous(world).unwrap(),
            splits: gpu.alloc(world, splits).unwrap().rendezvous(world).unwrap(),
            out: gpu.alloc(world, out).unwrap(),
            received: gpu.alloc(world, received).unwrap(),
        }
    }
}

/// The numbers of a plan: experts, offsets, rows of input and output, alignment.
fn plan_of(launched: &Launched) -> (u32, u32, [u64; 3]) {
    let number = |i| launched.u64(i).unwrap();
    (launched.u32(3).unwrap(), launched.u32(4).unwrap(), [5, 6, 7].map(number))
}

#[test]
fn two_kernels_share_a_plan_and_get_what_they_take() {
    let drivers = drivers(2);
    let seen: Vec<Seen> = drivers.iter().map(|driver| noting(driver)).collect();
    ranks(&drivers, |world, _, gpu, stream| {
        let row = 3;
        let mut m = Memory::new(world, gpu, [30 * row + 1, 4, 20 * row + 2, 8]);
        let mut one = gpu.alloc::<i64>(world, 2).unwrap().rendezvous(world).unwrap();
        let mut few = gpu.alloc::<i64>(world, 4).unwrap();
        let Memory { x, splits, out, received } = &mut m;
        x.all_to_all_v(row, &mut one, out.view_mut(), few.view_mut(), stream).unwrap();
        assert_eq!(
            (out.read(stream).unwrap()[0], few.read(stream).unwrap()[0]),
            (OUT, RECEIVED.into())
        );
        x.all_to_all_v_2d(row, splits, 8, out.view_mut(), received.view_mut(), stream).unwrap();
        assert_eq!(received.read(stream).unwrap()[0], RECEIVED.into());
        few.write(&[0; 4], stream).unwrap();
        x.all_to_all_v_2d_offset(row, splits, out.view_mut(), few.view_mut(), stream).unwrap();
        assert_eq!(few.read(stream).unwrap()[0], RECEIVED.into());

        let seen: Vec<Launched> = std::mem::take(&mut *seen[world.rank()].lock().unwrap());
        let names: Vec<_> = seen.iter().map(|launched| launched.function.as_str()).collect();
        assert_eq!(names, ["all_to_all_v_plan", "all_to_all_v"].repeat(3));
        let plans: Vec<_> = seen.iter().step_by(2).map(plan_of).collect();
        assert_eq!(plans[0], (1, 0, [30, 20, 1]));
        assert_eq!(plans[1], (2, 0, [30, 20, 8]));
        assert_eq!(plans[2], (1, 1, [30, 20, 1]));
        let ops = [ALL_TO_ALL_V, ALL_TO_ALL_V_2D, ALL_TO_ALL_V_2D_OFFSET];
        let tables = [one.handle(), splits.handle(), splits.handle()];
        for ((pair, op), table) in seen.chunks(2).zip(ops).zip(tables) {
            let (plan, fetch) = (&pair[0], &pair[1]);
            assert_eq!((plan.grid, fetch.grid), ([1, 1, 1], [1, 1, 1]));
            assert_eq!((plan.block, fetch.block), ([512, 1, 1], [256, 1, 1]));
            assert_eq!([plan, fetch].map(|l| Group::of(l).u32(12)), [op, op]);
            assert_eq!(Group::of(plan).u32(16), Group::of(fetch).u32(16), "one digest");
            let pointers = |l: &Launched, rank: usize| {
                u64::from_ne_bytes(l.parameters[1][8 * rank..8 * rank + 8].try_into().unwrap())
            };
            for rank in 0..2 {
                assert_eq!(pointers(plan, rank), table.buffer_ptrs()[rank] as u64);
                assert_eq!(pointers(fetch, rank), x.handle().buffer_ptrs()[rank] as u64);
            }
            assert_eq!(plan.u64(2), fetch.u64(4), "one plan");
            assert_eq!((fetch.u32(5), fetch.u32(6)), (plan.u32(3), plan.u32(4)));
            assert_eq!(fetch.u64(7), Some(4 * row as u64));
        }
    });
}

#[test]
fn grids_fit_and_a_larger_plan_has_memory_of_its_own() {
    let drivers = drivers(2);
    let seen: Vec<Seen> = drivers.iter().map(|driver| noting(driver)).collect();
    on(
        &drivers,
        |_| 0,
        |world, _, gpu, stream| {
            let mut small = Memory::new(world, gpu, [1 << 20, 2, 1 << 20, 4]);
            let mut large = Memory::new(world, gpu, [16, 1 << 16, 16, 1 << 17]);
            for m in [&mut small, &mut large] {
                let (out, received) = (m.out.view_mut(), m.received.view_mut());
                m.x.all_to_all_v_2d(1, &mut m.splits, 1, out, received, stream).unwrap();
            }
            let (out, received) = (small.out.view_mut(), small.received.view_mut());
            small.x.all_to_all_v(1, &mut small.splits, out, received, stream).unwrap();
            let seen = seen[world.rank()].lock().unwrap();
            assert_eq!(seen[1].grid, [16, 1, 1], "half of what the device holds");
            let words: Vec<_> = seen.iter().step_by(2).map(|plan| plan.u64(2).unwrap()).collect();
            assert!(words[0] != words[1] && words[0] == words[2]);
            // 1 + 3 P + size * P words, for P = 65536.
            super::load(words[1] + 8 * (5 * 65_536));
        },
    );
}

#[test]
fn what_cannot_be_right_is_refused_and_launches_nothing() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let mut m = Memory::new(world, gpu, [20, 2, 20, 4]);
        let mut odd = gpu.alloc::<i64>(world, 3).unwrap().rendezvous(world).unwrap();
        let half = world.subgroup(&[0, 1]).unwrap();
        let mut other = gpu.alloc::<i64>(world, 2).unwrap().rendezvous(&half).unwrap();
        let mut none = gpu.alloc::<i64>(world, 3).unwrap();
        let Memory { x, splits, out, received } = &mut m;
        let text = |result: symmem::Result<()>| result.unwrap_err().to_string();
        let e = text(x.all_to_all_v(1, &mut odd, out.view_mut(), received.view_mut(), stream));
        assert!(e.contains("splits of 2 elements, got 3"), "{e}");
        let e = text(x.all_to_all_v(0, splits, out.view_mut(), received.view_mut(), stream));
        assert!(e.contains("a row length of at least 1"), "{e}");
        let e = x.all_to_all_v_2d(1, splits, 0, out.view_mut(), received.view_mut(), stream);
        assert!(text(e).contains("an alignment of at least 1"));
        let e = x.all_to_all_v_2d(1, &mut odd, 1, out.view_mut(), received.view_mut(), stream);
        assert!(text(e).contains("a length divisible by the 2 ranks"));
        let e = text(x.all_to_all_v(1, splits, out.view_mut(), none.view_mut(), stream));
        assert!(e.contains("splits and offsets received of 4 elements, got 3"), "{e}");
        let e = text(x.all_to_all_v_2d_offset(1, splits, out.view_mut(), none.view_mut(), stream));
        assert!(e.contains("splits and offsets of 0 elements, got 2"), "{e}");
        let e = text(x.all_to_all_v(1, &mut other, out.view_mut(), received.view_mut(), stream));
        assert!(e.contains("splits in the memory's group and on its device"), "{e}");
        assert!(driver.launches().is_empty());
        x.all_to_all_v(1, splits, out.view_mut(), received.view_mut(), stream).unwrap();
        assert_eq!(driver.launches().len(), 2);
        world.barrier().unwrap();
    });
}

#[test]
fn a_capture_needs_a_call_before_it_and_replays() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let mut m = Memory::new(world, gpu, [20, 1, 20, 2]);
        let Memory { x, splits, out, received } = &mut m;
        let mut call = || x.all_to_all_v(1, splits, out.view_mut(), received.view_mut(), stream);
        let e = stream.capture(&mut call).unwrap_err().to_string();
        assert!(e.contains("a call of this size before the first that is captured"), "{e}");
        call().unwrap();
        let graph = stream.capture(&mut call).unwrap();
        // SAFETY: all memory is there, and there is no other rank.
        unsafe { graph.launch(stream) }.unwrap();
        assert_eq!(driver.launches().len(), 4);
    });
}

#[test]
fn rows_that_do_not_fit_are_a_usage_error_of_their_call() {
    let drivers = drivers(2);
    for driver in &drivers {
        driver.kernel("all_to_all_v_plan", &declared("rows", "all_to_all_v_plan"), |launched| {
            let group = Group::of(launched);
            let note = [5, group.u32(12), 0, 1, 3, 0];
            for (i, value) in note.into_iter().enumerate() {
                word(group.mailbox() + 8 + 4 * i as u64).store(value, Ordering::Relaxed);
            }
            word(group.mailbox() + 4).store(2, Ordering::Release);
        });
    }
    ranks(&drivers, |world, _, gpu, stream| {
        let mut m = Memory::new(world, gpu, [20, 2, 20, 4]);
        let (out, received) = (m.out.view_mut(), m.received.view_mut());
        m.x.all_to_all_v_2d(1, &mut m.splits, 4, out, received, stream).unwrap();
        let e = m.x.synchronize(stream).unwrap_err();
        assert!(matches!(e, Error::Usage { op: "all_to_all_v_2d", .. }), "{e:?}");
        assert!(e.to_string().contains("rows of rank 1 beyond the output"), "{e}");
        m.x.barrier(stream).unwrap_err();
        world.resync().unwrap();
        m.x.barrier(stream).unwrap();
        m.x.synchronize(stream).unwrap();
    });
}
