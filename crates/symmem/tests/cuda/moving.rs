//! Collectives with a root and with odd sizes, compared with the same call on host memory.

use half::bf16;
use symmem::cuda::{Gpu, Stream};
use symmem::{F8E4M3, ReduceOp, World};
use symmem_testing::test_name;

use crate::{Sample, each, input, same};

/// What nobody sends: where it stays, nothing was written.
fn untouched<T: Sample>(len: usize) -> Vec<T> {
    vec![T::sample(424_242); len]
}

fn host<T: Sample>(world: &World, data: &[T]) -> symmem::Symmetric<T> {
    let mut x = world.alloc::<T>(data.len()).unwrap().rendezvous(world).unwrap();
    x.local_mut().copy_from_slice(data);
    x
}

/// Reduce, gather and scatter with the first and the last rank as root.
fn rooted<T: Sample>(world: &World, gpu: &Gpu, stream: &Stream, block: usize) {
    let (n, own) = (world.size(), world.rank());
    let (len, what) = (n * block, format!("{} in blocks of {block}, {n} ranks", T::DTYPE));
    let data = input::<T>(own, len);
    let mut theirs = host(world, &data);
    let mut x = gpu.alloc::<T>(world, len).unwrap().rendezvous(world).unwrap();
    x.write(&data, stream).unwrap();
    let mut one = gpu.alloc::<T>(world, len).unwrap();
    let mut all = gpu.alloc::<T>(world, n * len).unwrap();
    let mut part = gpu.alloc::<T>(world, block).unwrap();
    for root in [0, n - 1] {
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            let mut expected = untouched::<T>(len);
            one.write(&expected, stream).unwrap();
            x.reduce(op, root, one.view_mut(), stream).unwrap();
            theirs.reduce(op, root, &mut expected).unwrap();
            same(&one.read(stream).unwrap(), &expected, &format!("reduce {op} to {root}, {what}"));
        }
        let mut expected = untouched::<T>(n * len);
        all.write(&expected, stream).unwrap();
        x.gather(root, all.view_mut(), stream).unwrap();
        theirs.gather(root, &mut expected).unwrap();
        same(&all.read(stream).unwrap(), &expected, &format!("gather to {root}, {what}"));

        let mut expected = untouched::<T>(block);
        part.write(&expected, stream).unwrap();
        x.scatter(root, part.view_mut(), stream).unwrap();
        theirs.scatter(root, &mut expected).unwrap();
        same(&part.read(stream).unwrap(), &expected, &format!("scatter from {root}, {what}"));
    }
    same(&x.read(stream).unwrap(), &data, "the input");
}

/// All-to-all, and reduce-scatter by columns of so many rows.
fn by_blocks<T: Sample>(world: &World, gpu: &Gpu, stream: &Stream, rows: usize, block: usize) {
    let (n, own) = (world.size(), world.rank());
    let (len, columns) = (n * rows * block, n * block);
    let what = format!("{} in {rows} rows of {columns}", T::DTYPE);
    let data = input::<T>(own, len);
    let mut theirs = host(world, &data);
    let mut x = gpu.alloc::<T>(world, len).unwrap().rendezvous(world).unwrap();
    x.write(&data, stream).unwrap();

    let (mut out, mut expected) = (gpu.alloc(world, len).unwrap(), untouched::<T>(len));
    x.all_to_all(out.view_mut(), stream).unwrap();
    theirs.all_to_all(&mut expected).unwrap();
    same(&out.read(stream).unwrap(), &expected, &format!("all_to_all of {what}"));

    for op in [ReduceOp::Sum, ReduceOp::Min] {
        let mut out = gpu.alloc(world, rows * block).unwrap();
        let mut expected = untouched::<T>(rows * block);
        x.reduce_scatter_last_dim(op, columns, out.view_mut(), stream).unwrap();
        theirs.reduce_scatter_last_dim(op, columns, &mut expected).unwrap();
        let what = format!("reduce_scatter_last_dim {op} of {what}");
        same(&out.read(stream).unwrap(), &expected, &what);
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn roots_get_and_give_what_they_do_on_the_host() {
    each(test_name!(), |world, gpu, stream| {
        for block in [1, 7, 4099] {
            rooted::<f32>(world, gpu, stream, block);
            rooted::<u8>(world, gpu, stream, block);
        }
        rooted::<bf16>(world, gpu, stream, 333);
        rooted::<i64>(world, gpu, stream, 1025);
        rooted::<F8E4M3>(world, gpu, stream, 65);
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn blocks_of_odd_sizes_arrive_as_on_the_host() {
    each(test_name!(), |world, gpu, stream| {
        for (rows, block) in [(1, 1), (3, 5), (7, 33), (2, 4097)] {
            by_blocks::<f32>(world, gpu, stream, rows, block);
            by_blocks::<u8>(world, gpu, stream, rows, block);
        }
        by_blocks::<bf16>(world, gpu, stream, 5, 129);
        by_blocks::<f64>(world, gpu, stream, 9, 3);
    });
}
