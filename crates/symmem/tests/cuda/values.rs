//! Values in the pad on a device: a rank that finds one sees what was before it, and one that waits in vain is told so.

use symmem::Error;
use symmem::cuda::Until;
use symmem_testing::test_name;

use crate::{each, hasty, input, same};

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn what_is_put_is_there_when_its_value_is() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own, len) = (world.size(), world.rank(), 10_001);
        let (next, last) = ((own + 1) % n, (own + n - 1) % n);
        let x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
        let mut sent = gpu.alloc::<f32>(world, len).unwrap();
        for round in 1..20 {
            sent.write(&input::<f32>(own + 100 * round, len), stream).unwrap();
            x.put_with_value(next, 0, sent.view(), (5, round as u64), stream).unwrap();
            let (exact, least) = (Until::Equal(round as u64), Until::AtLeast(round as u64));
            x.wait_value(last, 5, if round % 2 == 0 { exact } else { least }, stream).unwrap();
            same(&x.read(stream).unwrap(), &input::<f32>(last + 100 * round, len), "what was put");
            x.barrier(stream).unwrap(); // nobody puts again before all have looked
        }
        x.synchronize(stream).unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_value_that_does_not_come_is_a_timeout() {
    each(test_name!(), |world, gpu, stream| {
        let group = hasty(world);
        let x = gpu.alloc::<f32>(world, 16).unwrap().rendezvous(&group).unwrap();
        let from = (world.rank() + 1) % world.size();
        x.wait_value(from, 0, Until::Equal(7), stream).unwrap();
        let e = x.synchronize(stream).unwrap_err();
        // The first to give up tells the others.
        let told = matches!(&e, Error::Timeout { op: "wait_value", .. } | Error::PeerFailed { .. });
        assert!(told, "{e}");
    });
}
