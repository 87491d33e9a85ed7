//! Settings of the process and of a world: signal pad sizes, backends, records of calls.
#![allow(clippy::unwrap_used, reason = "helpers of tests stop at the first surprise too")]

use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use symmem::internals::{set_signal_pad_size, signal_pad_size};
use symmem::{DEFAULT_SIGNAL_PAD_SIZE, ReduceOp, World};
use symmem_testing::{Ranks, test_name};

/// The pad size is a setting of the process: one test at a time may change it.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn the_pad_size_is_32_channels_of_72_ranks_until_set() {
    let _alone = alone();
    assert_eq!((signal_pad_size(), DEFAULT_SIGNAL_PAD_SIZE), (9216, 9216));
    set_signal_pad_size(1 << 20).unwrap();
    assert_eq!(signal_pad_size(), 1 << 20);
    for senseless in [3, 5, 1 << 40] {
        let e = set_signal_pad_size(senseless).unwrap_err().to_string();
        assert!(e.contains("a signal pad size in [4, 4194304] divisible by 4"), "{e}");
    }
    set_signal_pad_size(0).unwrap();
    assert_eq!(signal_pad_size(), 9216);
}

#[test]
fn a_new_pad_size_is_for_new_memory_and_old_memory_keeps_its_own() {
    let _alone = alone();
    World::threads(1, |world| {
        let old = world.alloc::<u32>(64).unwrap().rendezvous(&world).unwrap();
        set_signal_pad_size(2 * 9216).unwrap();
        let new = world.alloc::<u32>(64).unwrap().rendezvous(&world).unwrap();
        assert_eq!(old.handle().signal_pad_size(), 9216);
        assert_eq!(old.handle().signal_pad().words(0).unwrap().len(), 9216 / 4);
        assert_eq!(new.handle().signal_pad_size(), 2 * 9216);
        assert_eq!(new.handle().signal_pad().words(0).unwrap().len(), 2 * 9216 / 4);
        assert_eq!((world.signal_pad_size(), world.channels()), (9216, 9216 / 4));
        set_signal_pad_size(0).unwrap();
    })
    .unwrap();
}

#[test]
fn data_and_pad_do_not_touch() {
    let _alone = alone();
    World::threads(1, |world| {
        let mut x = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
        let handle = x.handle().clone();
        let words = handle.signal_pad().words(0).unwrap();
        words.iter().for_each(|w| w.store(42, std::sync::atomic::Ordering::Relaxed));
        x.local_mut()[0] = 0;
        assert!(words.iter().all(|w| w.load(std::sync::atomic::Ordering::Relaxed) == 42));
        assert_eq!((handle.buffer_ptrs()[0] % 128, handle.signal_pad_ptrs()[0] % 128), (0, 0));
    })
    .unwrap();
}

#[test]
fn a_backend_is_chosen_by_name_and_an_unknown_one_is_refused_with_the_known() {
    for name in ["process", "host"] {
        let options = World::builder().backend(name);
        options.threads(1, |world| assert_eq!(world.backend_name(), name)).unwrap();
    }
    let options = World::builder().backend("cuda");
    let e = options.threads(1, drop).unwrap_err().to_string();
    assert_eq!(e, "backend: expected a backend among process, host, got \"cuda\"");
}

#[test]
fn the_environment_chooses_the_backend_and_a_wrong_value_is_refused() {
    Ranks::new(2).env("SYMMEM_BACKEND", "host").start(test_name!(), || {
        let world = World::from_env().unwrap();
        assert_eq!(world.backend_name(), "host");
        drop(world);
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("SYMMEM_BACKEND", "tape") };
        let e = World::from_env().unwrap_err().to_string();
        assert!(e.contains("a backend among process, host, got \"tape\""), "{e}");
    });
}

#[test]
fn a_process_that_ends_with_everything_alive_ends_well() {
    Ranks::new(2).run(test_name!(), |world| {
        let x = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
        world.barrier().unwrap();
        std::mem::forget((x, world));
    });
}

#[test]
fn threads_of_one_rank_may_rendezvous_in_different_groups_at_once() {
    World::threads(2, |world| {
        let groups = [(); 4].map(|()| world.subgroup(&[0, 1]).unwrap());
        std::thread::scope(|scope| {
            for (i, group) in groups.iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..50 {
                        let mut x = group.alloc::<u64>(64).unwrap().rendezvous(group).unwrap();
                        x.local_mut().fill((i * 100 + round) as u64);
                        let shared = x.share().unwrap();
                        assert!(
                            shared
                                .peer(1 - group.rank())
                                .unwrap()
                                .iter()
                                .all(|v| *v == (i * 100 + round) as u64)
                        );
                        shared.release().unwrap();
                    }
                });
            }
        });
    })
    .unwrap();
}

/// Collects what is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What a world of one rank logs in the course of `body`.
fn logged(body: impl Fn(&World) + Sync) -> String {
    let log = Log::default();
    let writer = log.clone();
    let subscriber: tracing::Dispatch = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish()
        .into();
    World::threads(1, |world| tracing::dispatcher::with_default(&subscriber, || body(&world)))
        .unwrap();
    String::from_utf8(log.0.lock().unwrap().clone()).unwrap()
}

#[test]
fn every_synchronisation_leaves_a_record() {
    let text = logged(|world| {
        let soon = std::time::Duration::from_secs(10);
        world.barrier_on(3, soon).unwrap();
        world.put_signal(0, 4, soon).unwrap();
        world.wait_signal(0, 4, soon).unwrap();
    });
    for record in [
        "op=\"barrier\" channel=3",
        "op=\"put_signal\" rank=0 channel=4",
        "op=\"wait_signal\" rank=0 channel=4",
    ] {
        assert!(text.contains(record), "{record} in {text}");
    }
}

/// Whatever the way: small and large, symmetric and ordinary memory.
#[test]
fn every_collective_leaves_a_record() {
    for len in [4, 40_000] {
        let text = logged(|world| {
            let group = world.subgroup_builder(&[0]).name("some").build().unwrap();
            let mut x = group.alloc::<u32>(len).unwrap().rendezvous(&group).unwrap();
            let mut out = vec![0; len];
            x.all_reduce(ReduceOp::Sum).unwrap();
            x.all_gather(&mut out).unwrap();
            x.reduce_scatter(ReduceOp::Sum, &mut out).unwrap();
            x.all_to_all(&mut out).unwrap();
            x.broadcast(0).unwrap();
            x.reduce(ReduceOp::Sum, 0, &mut out).unwrap();
            x.gather(0, &mut out).unwrap();
            x.scatter(0, &mut out).unwrap();
        });
        let ordinary = logged(|world| {
            let group = world.subgroup_builder(&[0]).name("some").build().unwrap();
            let (mut input, mut out) = (vec![0_u32; len], vec![0; len]);
            group.all_reduce(&mut input, ReduceOp::Sum).unwrap();
            group.all_gather(&input, &mut out).unwrap();
            group.reduce_scatter(&input, ReduceOp::Sum, &mut out).unwrap();
            group.all_to_all(&input, &mut out).unwrap();
            group.broadcast(&mut input, 0).unwrap();
        });
        let both = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"];
        let record = |text: &str, op: &str| {
            let fields = [
                "DEBUG".to_owned(),
                format!("op=\"{op}\""),
                "group=\"some\" rank=0".to_owned(),
                format!("bytes={} dtype=u32 way=", len * 4),
            ];
            let told = |line: &str| fields.iter().all(|field| line.contains(field.as_str()));
            let records = text.lines().filter(|line| told(line)).count();
            assert_eq!(records, 1, "{op} of {len} in {text}");
        };
        both.iter().for_each(|op| record(&ordinary, op));
        both.iter().chain(&["reduce", "gather", "scatter"]).for_each(|op| record(&text, op));
    }
}

#[test]
fn more_than_two_gib_is_a_length_like_any_other() {
    let options = World::builder().backend("host");
    options
        .threads(1, |world| {
            let len = (2 << 30) + 1;
            let x = match world.alloc::<u8>(len) {
                Ok(x) => x,
                Err(symmem::Error::Unavailable { what, why, .. }) => {
                    return eprintln!("skipped: {what}: {why}");
                }
                Err(e) => panic!("{e}"),
            };
            let mut x = x.rendezvous(&world).unwrap();
            x.local_mut()[len - 1] = 7;
            assert_eq!(x.handle().buffer_size(), len);
            let shared = x.share().unwrap();
            assert_eq!(shared.peer(0).unwrap()[len - 1], 7);
        })
        .unwrap();
}
