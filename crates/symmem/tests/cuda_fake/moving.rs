//! Launches of collectives with a root, with blocks and with rows: what their kernels get.

use std::sync::{Arc, Mutex};

use symmem::ReduceOp;
use symmem_sys::cuda::fake::{Fake, Launched};

use super::{declared, drivers, ranks};

type Seen = Arc<Mutex<Vec<Launched>>>;

/// Has launches noted with as many bytes of each parameter as the kernel takes.
fn noting(driver: &Fake) -> Seen {
    let seen = Seen::default();
    let moves = ["all_to_all", "gather", "scatter"].map(|kernel| ("move", kernel));
    for (ptx, kernel) in moves.into_iter().chain([("reduce_f32", "reduce_pull")]) {
        let into = seen.clone();
        driver.kernel(kernel, &declared(ptx, kernel), move |launched| {
            into.lock().unwrap().push(launched.clone());
        });
    }
    seen
}

/// What the two ranks' launches of `name` got: the numbers of 8 bytes from parameter 3 on, then those of 4.
fn numbers(launched: &Launched, name: &str) -> (Vec<u64>, Vec<u32>) {
    assert_eq!(launched.function, name);
    let all = 3..launched.count;
    let wide = all.clone().filter_map(|i| launched.u64(i)).collect();
    (wide, all.filter_map(|i| launched.u32(i)).collect())
}

#[test]
fn kernels_get_roots_blocks_and_rows() {
    let drivers = drivers(2);
    let seen: Vec<Seen> = drivers.iter().map(|driver| noting(driver)).collect();
    ranks(&drivers, |world, _, gpu, stream| {
        let own = world.rank();
        let mut x = gpu.alloc::<f32>(world, 6).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<f32>(world, 6).unwrap();
        let mut all = gpu.alloc::<f32>(world, 12).unwrap();
        let mut half = gpu.alloc::<f32>(world, 3).unwrap();
        x.all_to_all(out.view_mut(), stream).unwrap();
        x.gather(1, all.view_mut(), stream).unwrap();
        x.scatter(0, half.view_mut(), stream).unwrap();
        x.reduce(ReduceOp::Max, 1, out.view_mut(), stream).unwrap();
        x.reduce_scatter_last_dim(ReduceOp::Sum, 2, half.view_mut(), stream).unwrap();
        let seen = std::mem::take(&mut *seen[own].lock().unwrap());
        assert_eq!(seen.len(), 5);
        // First byte, bytes; root.
        assert_eq!(numbers(&seen[0], "all_to_all"), (vec![0, 12], vec![]));
        assert_eq!(numbers(&seen[1], "gather"), (vec![0, 24], vec![1]));
        assert_eq!(numbers(&seen[2], "scatter"), (vec![0, 12], vec![0]));
        // First element, rows, columns, pitch; active, operator.
        let (is_root, max, sum) = (u32::from(own == 1), ReduceOp::Max as u32, ReduceOp::Sum as u32);
        assert_eq!(numbers(&seen[3], "reduce_pull"), (vec![0, 1, 6, 6], vec![is_root, max]));
        assert_eq!(numbers(&seen[4], "reduce_pull"), (vec![own as u64, 3, 1, 2], vec![1, sum]));
        world.barrier().unwrap();
    });
}

#[test]
fn roots_and_lengths_that_are_not_there_launch_nothing() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<f32>(world, 6).unwrap().rendezvous(world).unwrap();
        let mut odd = gpu.alloc::<f32>(world, 5).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<f32>(world, 6).unwrap();
        let text = |result: symmem::Result<()>| result.unwrap_err().to_string();
        for e in [
            text(x.reduce(ReduceOp::Sum, 2, out.view_mut(), stream)),
            text(x.gather(2, out.view_mut(), stream)),
            text(x.scatter(2, out.view_mut(), stream)),
        ] {
            assert!(e.contains("a rank in [0, 2), got 2"), "{e}");
        }
        let e = text(odd.all_to_all(out.view_mut(), stream));
        assert!(e.contains("a length divisible by the 2 ranks, got 5"), "{e}");
        let e = text(x.scatter(0, out.view_mut(), stream));
        assert!(e.contains("an output of 3 elements, got 6"), "{e}");
        let e = text(x.reduce_scatter_last_dim(ReduceOp::Sum, 4, out.view_mut(), stream));
        assert!(e.contains("a number of columns that divides 6, got 4"), "{e}");
        let e = x.gather(world.rank(), out.view_mut(), stream);
        assert!(text(e).contains("an output of 12 elements, got 6"));
        assert!(driver.launches().is_empty());
        world.resync().unwrap(); // what a root refuses concerns all
        x.all_to_all(out.view_mut(), stream).unwrap();
        assert_eq!(driver.launches().len(), 1);
        world.barrier().unwrap();
    });
}
