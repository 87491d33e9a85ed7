//! All-to-all with splits on a device, compared with the same call on host memory.

use symmem::cuda::{Gpu, Stream};
use symmem::{Error, World};
use symmem_testing::{Random, test_name};

use crate::{Sample, each, input, same};

/// What nobody sends: where it stays, nothing was written.
const UNTOUCHED: i64 = -7;

/// Splits of this rank: `entries` of the table that all ranks make alike, many of them 0.
fn splits(random: &mut Random, world: &World, entries: usize) -> Vec<i64> {
    let mut split = || (random.below(9) as i64 - 3).max(0);
    let all: Vec<i64> = (0..world.size() * entries).map(|_| split()).collect();
    all[world.rank() * entries..][..entries].to_vec()
}

fn on_host<T: symmem::Element>(world: &World, values: &[T]) -> symmem::Symmetric<T> {
    let mut x = world.alloc::<T>(values.len()).unwrap().rendezvous(world).unwrap();
    x.local_mut().copy_from_slice(values);
    x
}

fn on_device<T: symmem::Element>(
    world: &World,
    gpu: &Gpu,
    stream: &Stream,
    values: &[T],
) -> symmem::cuda::Symmetric<T> {
    let mut x = gpu.alloc::<T>(world, values.len()).unwrap().rendezvous(world).unwrap();
    x.write(values, stream).unwrap();
    x
}

/// To the experts and back, on the device as on the host: all bytes alike, also those that nothing is written to.
fn there_and_back<T: Sample>(
    world: &World,
    gpu: &Gpu,
    stream: &Stream,
    row_len: usize,
    (experts, align): (usize, usize),
    splits: &[i64],
) {
    let (n, own, what) = (world.size(), world.rank(), format!("{experts} experts, {}", T::DTYPE));
    let rows = (6 * n + align) * experts * n;
    let (data, blank) = (input::<T>(own, rows * row_len), input::<T>(77, rows * row_len));
    let received = vec![UNTOUCHED; 2 * n * experts];

    let (mut x, mut table) = (on_host(world, &data), on_host(world, splits));
    let (mut out, mut there) = (on_host(world, &blank), on_host(world, &received));
    let (to, into) = (out.local_mut(), there.local_mut());
    x.all_to_all_v_2d(row_len, &mut table, align, to, into).unwrap();
    let (expected, expected_there) = (out.local().to_vec(), there.local().to_vec());
    let (mut back, mut returned) = (blank.clone(), received.clone());
    out.all_to_all_v_2d_offset(row_len, &mut there, &mut back, &mut returned).unwrap();

    let mut x = on_device(world, gpu, stream, &data);
    let mut table = on_device(world, gpu, stream, splits);
    let mut out = on_device(world, gpu, stream, &blank);
    let mut there = on_device(world, gpu, stream, &received);
    let (to, into) = (out.view_mut(), there.view_mut());
    x.all_to_all_v_2d(row_len, &mut table, align, to, into, stream).unwrap();
    assert_eq!(there.read(stream).unwrap(), expected_there, "received, {what}");
    same(&out.read(stream).unwrap(), &expected, &format!("rows of {what}"));
    let mut here = gpu.alloc::<T>(world, blank.len()).unwrap();
    here.write(&blank, stream).unwrap();
    let mut got = gpu.alloc::<i64>(world, received.len()).unwrap();
    let (to, into) = (here.view_mut(), got.view_mut());
    out.all_to_all_v_2d_offset(row_len, &mut there, to, into, stream).unwrap();
    assert_eq!(got.read(stream).unwrap(), returned, "returned, {what}");
    same(&here.read(stream).unwrap(), &back, &format!("rows that came back, {what}"));
    out.synchronize(stream).unwrap();
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn experts_get_their_rows_and_give_them_back_as_on_the_host() {
    each(test_name!(), |world, gpu, stream| {
        let mut random = Random(11);
        for shape in [(1, 1), (2, 1), (3, 4), (5, 8), (40, 16)] {
            let splits = splits(&mut random, world, world.size() * shape.0);
            there_and_back::<f32>(world, gpu, stream, 4, shape, &splits);
            there_and_back::<u8>(world, gpu, stream, 13, shape, &splits);
        }
    });
}

/// The numbers of rows lie on the device: a graph that is replayed has those of the day.
#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_replayed_graph_sends_what_the_splits_say_then() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own, row_len) = (world.size(), world.rank(), 3);
        let (mut random, len) = (Random(5), 6 * n * row_len);
        let mut x = on_device(world, gpu, stream, &input::<f32>(own, len));
        let mut theirs = on_host(world, &input::<f32>(own, len));
        let mut table = on_device(world, gpu, stream, &vec![0; n]);
        let mut out = gpu.alloc::<f32>(world, len).unwrap();
        let mut received = gpu.alloc::<i64>(world, 2 * n).unwrap();
        let mut call = || {
            let (to, into) = (out.view_mut(), received.view_mut());
            x.all_to_all_v(row_len, &mut table, to, into, stream)
        };
        call().unwrap();
        stream.synchronize().unwrap();
        let graph = stream.capture(call).unwrap();
        let (mut expected, mut expected_received) = (vec![0.0; len], vec![0; 2 * n]);
        for _ in 0..4 {
            let splits = splits(&mut random, world, n);
            let to = (&mut expected[..], &mut expected_received[..]);
            theirs.all_to_all_v(row_len, &mut on_host(world, &splits), to.0, to.1).unwrap();
            table.write(&splits, stream).unwrap();
            // SAFETY: the memory lives, and all ranks launch theirs.
            unsafe { graph.launch(stream) }.unwrap();
            assert_eq!(received.read(stream).unwrap(), expected_received);
            same(&out.read(stream).unwrap(), &expected, "what came");
        }
        x.synchronize(stream).unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn rows_that_do_not_fit_are_refused_by_every_rank_of_a_device() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own, wrong) = (world.size(), world.rank(), 1 % world.size());
        let mut x = on_device(world, gpu, stream, &input::<f32>(own, 10 * n));
        let mut table = on_device(world, gpu, stream, &vec![2; n]);
        let mut out = on_device(world, gpu, stream, &vec![9.0; 2 * n]);
        let mut received = on_device(world, gpu, stream, &vec![UNTOUCHED; 2 * n]);
        // Two rows from each fill the output. One rank sends rank 0 something else.
        for (rows, why) in
            [(3, vec![0]), (-1, vec![wrong]), (i64::MAX, vec![0, wrong]), (i64::MIN, vec![wrong])]
        {
            let mut splits = vec![2; n];
            splits[0] = if own == wrong { rows } else { 2 };
            table.write(&splits, stream).unwrap();
            let (to, into) = (out.view_mut(), received.view_mut());
            x.all_to_all_v(1, &mut table, to, into, stream).unwrap();
            // A quick rank has the next call in the stream by then, which no other rank makes.
            let next = if own == 0 { x.barrier(stream) } else { Ok(()) };
            let e = next.and_then(|()| x.synchronize(stream)).unwrap_err();
            assert!(matches!(e, Error::Usage { op: "all_to_all_v", .. }), "{e}");
            let text = e.to_string();
            let named = |rank: &usize| text.contains(&format!("rows of rank {rank} "));
            assert!(why.iter().any(named), "{rows} rows: {text}");
            world.resync().unwrap();
        }
        assert_eq!(out.read(stream).unwrap(), vec![9.0; 2 * n], "nothing is written");
        assert_eq!(received.read(stream).unwrap(), vec![UNTOUCHED; 2 * n]);
        table.write(&vec![2; n], stream).unwrap();
        let (to, into) = (out.view_mut(), received.view_mut());
        x.all_to_all_v(1, &mut table, to, into, stream).unwrap();
        let expected: Vec<f32> =
            (0..n).flat_map(|rank| input::<f32>(rank, 10 * n)[2 * own..][..2].to_vec()).collect();
        same(&out.read(stream).unwrap(), &expected, "after the failures");
        x.synchronize(stream).unwrap();
    });
}
