//! Tiles of matrices, and all-to-all from one dimension to another, compared with what the host finds.

use half::{bf16, f16};
use symmem::cuda::Algorithm;
use symmem::cuda::{Gpu, Stream, Tile, TileMut, ViewMut};
use symmem::{Number, ReduceOp, World};
use symmem_testing::test_name;

use crate::{Sample, each, input, same};

/// What nobody computes: where it stays, nothing was written.
fn untouched<T: Sample>(len: usize) -> Vec<T> {
    vec![T::sample(424_242); len]
}

/// The sum of all ranks' elements, by the host's own collective.
fn sums<T: Sample>(world: &World, data: &[T]) -> Vec<T> {
    let mut x = world.alloc::<T>(data.len()).unwrap().rendezvous(world).unwrap();
    x.local_mut().copy_from_slice(data);
    x.all_reduce(ReduceOp::Sum).unwrap();
    x.local().to_vec()
}

fn tile_of<T: Number>(all: &[T], tile: &Tile) -> Vec<T> {
    let row = |i: usize| &all[tile.first + i * tile.pitch..][..tile.columns];
    (0..tile.rows).flat_map(|i| row(i).to_vec()).collect()
}

fn tiles<T: Sample>(world: &World, gpu: &Gpu, stream: &Stream, side: usize, edge: usize) {
    let (n, own) = (world.size(), world.rank());
    let data = input::<T>(own, side * side);
    let sums = sums(world, &data);
    let mut x = gpu.alloc::<T>(world, side * side).unwrap().rendezvous(world).unwrap();
    x.write(&data, stream).unwrap();
    let mut out = gpu.alloc::<T>(world, side * side).unwrap();
    let before = untouched::<T>(side * side);
    let at = |row: usize, column: usize| Tile {
        first: row * side + column,
        rows: edge,
        columns: edge,
        pitch: side,
    };
    let what = format!("{} in tiles of {edge}, {n} ranks", T::DTYPE);
    for root in [0, n - 1] {
        // Where the tile is in the input, it is in the output too; all else is left alone.
        out.write(&before, stream).unwrap();
        let tile = at(3, side - edge);
        let address = out.address() + (tile.first * size_of::<T>()) as u64;
        let room = side * side - tile.first;
        // SAFETY: within `out`, which lives until the stream has done it.
        let view = unsafe { ViewMut::from_raw(address, room) };
        let into = TileMut::within(view, side);
        x.tile_reduce(ReduceOp::Sum, tile, root, into, Algorithm::Auto, stream).unwrap();
        let mut expected = before.clone();
        if own == root {
            for row in 0..edge {
                let place = tile.first + row * side;
                expected[place..place + edge].copy_from_slice(&sums[place..place + edge]);
            }
        }
        same(&out.read(stream).unwrap(), &expected, &format!("a tile with {root}, {what}"));
    }
    // A tile for every other rank, or for each.
    for ratio in [1, 2] {
        let roots: Vec<usize> = (0..n).step_by(ratio).collect();
        let all: Vec<Tile> = roots.iter().map(|r| at(r % 2, r * edge % (side - edge))).collect();
        out.write(&before, stream).unwrap();
        let dense = TileMut::dense(out.view_mut());
        x.multi_root_tile_reduce(ReduceOp::Sum, &all, &roots, dense, Algorithm::Auto, stream)
            .unwrap();
        let mut expected = before.clone();
        if let Some(tile) = roots.iter().position(|root| *root == own).map(|i| &all[i]) {
            expected[..edge * edge].copy_from_slice(&tile_of(&sums, tile));
        }
        same(&out.read(stream).unwrap(), &expected, &format!("{} tiles, {what}", roots.len()));
    }
    same(&x.read(stream).unwrap(), &data, "the input");
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn tiles_are_reduced_where_they_belong_and_nowhere_else() {
    each(test_name!(), |world, gpu, stream| {
        for edge in [1, 7, 32, 128] {
            tiles::<f32>(world, gpu, stream, 256, edge);
            tiles::<f16>(world, gpu, stream, 256, edge);
            tiles::<bf16>(world, gpu, stream, 251, edge);
        }
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn blocks_at_offsets_are_reduced_with_their_owners() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own) = (world.size(), world.rank());
        for (of_rank, sizes, dim) in
            [(1, [64, 64], 0), (2, [64, 64], 1), (2, [16, 48], 0), (2, [16, 48], 1)]
        {
            // Blocks take turns between ranks; those of one turn are alike.
            let lengths: Vec<usize> = (0..n * of_rank).map(|i| sizes[i / n]).collect();
            let ends: Vec<usize> = lengths
                .iter()
                .scan(0, |end, length| {
                    *end += length;
                    Some(*end)
                })
                .collect();
            let extent = *ends.last().unwrap();
            let (rows, columns) = if dim == 0 { (extent, 32) } else { (32, extent) };
            let data = input::<f32>(own, rows * columns);
            let sums = sums(world, &data);
            let mut x = gpu.alloc::<f32>(world, rows * columns).unwrap().rendezvous(world).unwrap();
            x.write(&data, stream).unwrap();
            let mut outs: Vec<_> = (0..of_rank)
                .map(|turn| gpu.alloc::<f32>(world, sizes[turn] * 32).unwrap())
                .collect();
            let mut views: Vec<_> = outs.iter_mut().map(|out| out.view_mut()).collect();
            let shape = (rows, columns, columns);
            let (sum, way) = (ReduceOp::Sum, Algorithm::Auto);
            x.reduce_scatter_offset(sum, shape, dim, Some(&ends), None, &mut views, way, stream)
                .unwrap();
            for (turn, out) in outs.iter().enumerate() {
                let block = turn * n + own;
                let (start, length) = (ends[block] - lengths[block], lengths[block]);
                let tile = match dim {
                    0 => Tile { first: start * columns, rows: length, columns, pitch: columns },
                    _ => Tile { first: start, rows, columns: length, pitch: columns },
                };
                let what = format!("block {block} along {dim}, {n} ranks");
                same(&out.read(stream).unwrap(), &tile_of(&sums, &tile), &what);
            }
            same(&x.read(stream).unwrap(), &data, "the input");
        }
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn one_dimension_is_given_up_for_another() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own) = (world.size(), world.rank());
        for (rows, each) in [(8, 16), (5, 3), (1, 1000)] {
            let parts: Vec<Vec<u16>> =
                (0..n).map(|rank| input::<u16>(rank, rows * each * n)).collect();
            let mut x =
                gpu.alloc::<u16>(world, rows * each * n).unwrap().rendezvous(world).unwrap();
            let mut out = gpu.alloc::<u16>(world, rows * each * n).unwrap();
            x.write(&parts[own], stream).unwrap();
            x.all_to_all_nd((rows, n * each), (1, 0), out.view_mut(), stream).unwrap();
            let of =
                |rank: usize, i: usize| parts[rank][i * n * each + own * each..][..each].to_vec();
            let expected = (0..n).flat_map(|rank| (0..rows).flat_map(move |i| [(rank, i)]));
            let expected: Vec<u16> = expected.flat_map(|(rank, i)| of(rank, i)).collect();
            same(&out.read(stream).unwrap(), &expected, &format!("columns of {rows} by {each}"));

            x.all_to_all_nd((n * rows, each), (0, 1), out.view_mut(), stream).unwrap();
            let of =
                |rank: usize, i: usize| parts[rank][(own * rows + i) * each..][..each].to_vec();
            let expected = (0..rows).flat_map(|i| (0..n).flat_map(move |rank| [(rank, i)]));
            let expected: Vec<u16> = expected.flat_map(|(rank, i)| of(rank, i)).collect();
            same(&out.read(stream).unwrap(), &expected, &format!("rows of {rows} by {each}"));
        }
    });
}
