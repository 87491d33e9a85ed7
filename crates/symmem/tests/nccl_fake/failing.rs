//! Failures: of calls, of other ranks, of patience.

use std::sync::Barrier;

use symmem::{Error, ReduceOp, World};
use symmem_testing::{FakeNccl, Live};

use super::{LONG, SHORT, alone, devices, gpu, ranks};

#[test]
fn a_rank_that_never_comes_is_a_timeout_and_leaves_nothing() {
    let fake = FakeNccl::new();
    let nccl = fake.nccl();
    let id = nccl.unique_id().unwrap();
    let error = nccl.communicator(&gpu(0, 1), 3, &id, 0, SHORT).unwrap_err();
    let Error::Timeout { op, waiting_for, .. } = &error else { panic!("{error:?}") };
    assert_eq!((*op, waiting_for.as_slice()), ("communicator", &[1, 2][..]));
    assert_eq!(fake.live(), Live::default());
    assert_eq!(fake.calls("ncclCommAbort"), 1);
}

#[test]
fn a_rank_that_does_not_call_is_a_timeout_and_the_communicator_is_aborted() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        let comm = &rank.communicator;
        let mut x = rank.buffer(&[1.0_f32]);
        if rank.number() == 2 {
            return;
        }
        comm.set_deadline(SHORT);
        let error =
            comm.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream).unwrap_err();
        let Error::Timeout { op, waiting_for, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*op, waiting_for.contains(&2)), ("all_reduce", true));
        assert_eq!(comm.raw(), 0);
        let after = comm.broadcast(x.view_mut(), 0, &rank.stream).unwrap_err();
        assert!(matches!(after, Error::Unavailable { .. }), "{after:?}");
        assert!(after.to_string().contains("all_reduce was given up after"), "{after}");
        comm.check().unwrap_err();
    });
}

#[test]
fn another_thread_aborts_a_call_that_waits() {
    let fake = FakeNccl::new();
    let barrier = Barrier::new(2);
    ranks(&fake, 2, |rank| {
        if rank.number() == 1 {
            barrier.wait();
            return;
        }
        std::thread::scope(|scope| {
            let (comm, fake) = (rank.communicator.clone(), &fake);
            scope.spawn(move || {
                while fake.calls("ncclAllReduce") == 0 {
                    std::thread::yield_now();
                }
                comm.abort();
            });
            let mut x = rank.buffer(&[1.0_f32]);
            let comm = &rank.communicator;
            let ended = comm.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream);
            let text = ended.unwrap_err().to_string();
            assert!(text.contains("rank 0: all_reduce: the communicator"), "{text}");
            assert!(text.contains("it was aborted"), "{text}");
        });
        barrier.wait();
    });
}

#[test]
fn an_error_that_comes_later_is_told_and_ends_all_calls() {
    let fake = FakeNccl::new();
    ranks(&fake, 2, |rank| {
        let comm = &rank.communicator;
        comm.check().unwrap();
        rank.world.barrier().unwrap();
        if rank.number() == 0 {
            fake.async_error(-1, 6);
        }
        rank.world.barrier().unwrap();
        let text = comm.check().unwrap_err().to_string();
        let expected = format!("rank {}: check: NCCL Error 6: remote process", rank.number());
        assert!(text.starts_with(&expected), "{text}");
        let mut x = rank.buffer(&[1.0_f32]);
        let after = comm.broadcast(x.view_mut(), 0, &rank.stream).unwrap_err();
        assert!(matches!(after, Error::Unavailable { .. }), "{after:?}");
        assert!(after.to_string().contains("it has failed"), "{after}");
    });
    // What has failed is aborted, not finalized.
    assert_eq!((fake.calls("ncclCommFinalize"), fake.calls("ncclCommAbort")), (0, 2));
}

#[test]
fn survivors_of_a_failure_shrink_and_go_on() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        rank.world.barrier().unwrap();
        if rank.number() == 0 {
            fake.async_error(-1, 6);
        }
        rank.world.barrier().unwrap();
        if rank.number() == 2 {
            return;
        }
        let comm = &rank.communicator;
        comm.check().unwrap_err();
        let smaller = comm.shrink(&[2]).unwrap();
        let mut x = rank.buffer(&[rank.number() as i32 + 1]);
        smaller.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
        assert_eq!(x.read(&rank.stream).unwrap(), [3]);
    });
}

#[test]
fn a_call_that_nccl_refuses_names_rank_operation_and_its_words() {
    let fake = FakeNccl::new();
    ranks(&fake, 1, |rank| {
        fake.fail("ncclAllReduce", 1, 1);
        let comm = &rank.communicator;
        let mut x = rank.buffer(&[1.0_f32]);
        let refused = comm.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream);
        let error = refused.unwrap_err();
        let Error::Driver { call: "ncclAllReduce", why, .. } = &error else { panic!("{error:?}") };
        assert!(why.starts_with("rank 0: all_reduce: NCCL Error 1: unhandled cuda error"), "{why}");
        assert!(why.ends_with("ncclAllReduce fails because the test wants it"), "{why}");
        comm.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
    });
}

#[test]
fn what_cannot_be_made_leaves_nothing() {
    let fake = FakeNccl::new();
    let nccl = fake.nccl();
    for (call, code) in [("ncclGetUniqueId", 2), ("ncclCommInitRankConfig", 1), ("ncclGroupEnd", 3)]
    {
        fake.fail(call, code, 1);
        let text = nccl.of_devices(&[gpu(0, 1)], LONG).unwrap_err().to_string();
        assert!(text.contains(&format!("NCCL Error {code}: ")), "{call}: {text}");
        assert_eq!(fake.live(), Live::default(), "{call}");
    }
    let error = World::threads(2, |world| {
        if world.rank() == 1 {
            fake.fail("ncclGetUniqueId", 2, 1);
        }
        world.barrier().unwrap();
        world.set_timeout(LONG);
        nccl.of_group(&world, &gpu(world.rank(), 2)).err().map(|e| e.to_string())
    });
    let errors: Vec<String> = error.unwrap().into_iter().flatten().collect();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].contains("NCCL Error 2"), "{errors:?}");
    assert!(errors[1].contains("rank 0 could not do its part"), "{errors:?}");
}

#[test]
fn a_group_that_fails_halfway_is_still_ended() {
    let fake = FakeNccl::new();
    let world = alone();
    let (nccl, gpus, streams, comms) = devices(&fake, 2);
    let mut x = super::buffer(&world, &gpus[0], &streams[0], &[1.0_f32]);
    let mut y = super::buffer(&world, &gpus[1], &streams[1], &[2.0_f32]);
    for comm in &comms {
        comm.set_deadline(SHORT);
    }
    let halfway = nccl.group(|| {
        comms[0].all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &streams[0])?;
        comms[1].broadcast(y.view_mut(), 5, &streams[1])
    });
    let text = halfway.unwrap_err().to_string();
    assert!(text.contains("broadcast: expected a rank in [0, 2), got 5"), "{text}");
    assert_eq!(fake.calls("ncclGroupStart"), fake.calls("ncclGroupEnd"));
    // The one that had called has been aborted, for the other never did.
    assert_eq!((comms[0].raw(), comms[1].raw() != 0), (0, true));
    drop(comms);
    assert_eq!(fake.live(), Live::default());
}

#[test]
fn a_group_in_which_something_panics_is_ended_too() {
    let fake = FakeNccl::new();
    ranks(&fake, 1, |rank| {
        let panicking = std::panic::AssertUnwindSafe(|| {
            rank.nccl.group(|| -> symmem::Result<()> { panic!("as it is meant to") })
        });
        std::panic::catch_unwind(panicking).unwrap_err();
        assert!(rank.communicator.split(Some(0), 0).unwrap().is_some(), "a group is still open");
    });
}

#[test]
fn what_has_to_be_waited_for_is_refused_in_a_group() {
    let fake = FakeNccl::new();
    ranks(&fake, 1, |rank| {
        let split = rank.nccl.group(|| rank.communicator.split(Some(0), 0));
        let text = split.unwrap_err().to_string();
        assert_eq!(text, "rank 0: split: expected a call outside of a group, got one within");
    });
}

#[test]
fn a_close_that_fails_aborts() {
    let fake = FakeNccl::new();
    let (_, _, _, comms) = devices(&fake, 1);
    fake.fail("ncclCommFinalize", 3, 1);
    for one in comms {
        let text = one.close().unwrap_err().to_string();
        assert!(text.contains("rank 0: close: NCCL Error 3"), "{text}");
    }
    assert_eq!(fake.live(), Live::default());
}
