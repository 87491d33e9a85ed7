//! Reductions of tiles, and all-to-all by dimension: what kernels are told, and what is refused before one is launched.

use symmem::cuda::Algorithm;
use symmem::cuda::{Tile, TileMut};
use symmem::{Error, ReduceOp};
use symmem_sys::cuda::fake::Launched;

use super::multicast::able;
use super::{GROUP, configured, declared, drivers, ranks};

const POINTERS: usize = 576;
const SUM: ReduceOp = ReduceOp::Sum;

fn word(launched: &Launched, parameter: usize, at: usize) -> u64 {
    u64::from_ne_bytes(launched.parameters[parameter][at..at + 8].try_into().unwrap())
}

/// Number, pitches, and of the tile of this number: first element, rows, columns.
fn tiles(launched: &Launched, number: usize) -> [u64; 6] {
    let of = |array: usize| word(launched, 2, 24 + 128 * array + 8 * number);
    let pitches = [word(launched, 2, 8), word(launched, 2, 16)];
    [word(launched, 2, 0) & 0xffff_ffff, pitches[0], pitches[1], of(0), of(1), of(2)]
}

fn last(launches: Vec<Launched>, name: &str) -> Launched {
    let launched = launches.into_iter().next_back().unwrap();
    assert_eq!(launched.function, name);
    launched
}

#[test]
fn a_tile_goes_to_its_root_alone() {
    let sizes = declared("tiles_f32", "reduce_tiles");
    assert_eq!(sizes, [GROUP, POINTERS, 536, 4]);
    ranks(&drivers(2), |world, driver, gpu, stream| {
        driver.kernel("reduce_tiles", &sizes, |_| {});
        let mut x = gpu.alloc::<f32>(world, 1024).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<f32>(world, 1024).unwrap();
        let tile = Tile { first: 40, rows: 4, columns: 8, pitch: 32 };
        let into = TileMut::within(out.view_mut(), 32);
        x.tile_reduce(SUM, tile, 1, into, Algorithm::Auto, stream).unwrap();
        let expected = if world.rank() == 1 { [1, 32, 32, 40, 4, 8] } else { [0, 32, 0, 0, 0, 0] };
        assert_eq!(tiles(&last(driver.launches(), "reduce_tiles"), 0), expected);

        let other = Tile { first: 0, ..tile };
        let into = TileMut::dense(out.view_mut());
        x.multi_root_tile_reduce(SUM, &[tile, other], &[1, 0], into, Algorithm::Auto, stream)
            .unwrap();
        let first = if world.rank() == 1 { 40 } else { 0 };
        let launched = last(driver.launches(), "reduce_tiles");
        assert_eq!(tiles(&launched, 0), [1, 32, 0, first, 4, 8]);
    });
}

#[test]
fn the_switch_reduces_tiles_where_the_caller_asks_for_it() {
    let sizes = declared("multimem_f32", "multimem_reduce_tiles");
    assert_eq!(sizes, [GROUP, POINTERS, 8, 536]);
    ranks(&configured(2, &vec![able(); 2]), |world, driver, gpu, stream| {
        driver.kernel("multimem_reduce_tiles", &sizes, |_| {});
        let mut x = gpu.alloc::<f32>(world, 1024).unwrap().rendezvous(world).unwrap();
        let all = x.handle().multicast_ptr().unwrap() as u64;
        let mut out = gpu.alloc::<f32>(world, 1024).unwrap();
        let tile = Tile { first: 40, rows: 4, columns: 8, pitch: 32 };
        let into = TileMut::dense(out.view_mut());
        x.tile_reduce(SUM, tile, 0, into, Algorithm::Multimem, stream).unwrap();
        let launched = last(driver.launches(), "multimem_reduce_tiles");
        assert_eq!(launched.u64(2), Some(all));
        assert_eq!(word(&launched, 3, 0) & 0xffff_ffff, u64::from(world.rank() == 0));
        let into = TileMut::dense(out.view_mut());
        let e = x.tile_reduce(ReduceOp::Max, tile, 0, into, Algorithm::Multimem, stream);
        assert!(e.unwrap_err().to_string().contains("what the switch can add up"));
    });
}

#[test]
fn blocks_at_offsets_are_tiles_of_their_owners() {
    let sizes = declared("tiles_f32", "reduce_tiles");
    ranks(&drivers(2), |world, driver, gpu, stream| {
        driver.kernel("reduce_tiles", &sizes, |_| {});
        let mut x = gpu.alloc::<f32>(world, 64 * 8).unwrap().rendezvous(world).unwrap();
        let mut outs = [10, 22].map(|rows| gpu.alloc::<f32>(world, rows * 8).unwrap());
        let mut views: Vec<_> = outs.iter_mut().map(|out| out.view_mut()).collect();
        let (shape, ends) = ((64, 8, 8), [10, 20, 42, 64]);
        let auto = Algorithm::Auto;
        x.reduce_scatter_offset(SUM, shape, 0, Some(&ends), None, &mut views, auto, stream)
            .unwrap();
        let launched = last(driver.launches(), "reduce_tiles");
        let own = world.rank() as u64;
        assert_eq!(tiles(&launched, 0), [2, 8, 0, 80 * own, 10, 8]);
        assert_eq!(tiles(&launched, 1), [2, 8, 0, 160 + 176 * own, 22, 8]);

        // Along the columns, one for each, and those of the other rank's number.
        let mut out = gpu.alloc::<f32>(world, 64 * 4).unwrap();
        let mut views = [out.view_mut()];
        x.reduce_scatter_offset(SUM, shape, 1, None, Some(&[1, 0]), &mut views, auto, stream)
            .unwrap();
        let launched = last(driver.launches(), "reduce_tiles");
        assert_eq!(tiles(&launched, 0), [1, 8, 0, 4 - 4 * own, 64, 4]);
    });
}

#[test]
fn rows_and_columns_change_places() {
    let sizes = declared("rows", "all_to_all_nd");
    assert_eq!(sizes, [GROUP, POINTERS, 8, 8, 8, 8, 8, 8, 8]);
    ranks(&drivers(2), |world, driver, gpu, stream| {
        driver.kernel("all_to_all_nd", &sizes, |_| {});
        let mut x = gpu.alloc::<u16>(world, 60).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<u16>(world, 60).unwrap();
        let own = world.rank() as u64;
        let told = |launched: &Launched| [3, 4, 5, 6, 7, 8].map(|i| launched.u64(i).unwrap());
        x.all_to_all_nd((10, 6), (1, 0), out.view_mut(), stream).unwrap();
        let launched = last(driver.launches(), "all_to_all_nd");
        assert_eq!(told(&launched), [6 * own, 10, 6, 12, 60, 6]);
        x.all_to_all_nd((10, 6), (0, 1), out.view_mut(), stream).unwrap();
        let launched = last(driver.launches(), "all_to_all_nd");
        assert_eq!(told(&launched), [60 * own, 5, 12, 12, 12, 24]);
        for (shape, dims) in
            [((10, 6), (0, 0)), ((10, 7), (1, 0)), ((20, 3), (1, 0)), ((15, 4), (0, 1))]
        {
            let e = x.all_to_all_nd(shape, dims, out.view_mut(), stream).unwrap_err();
            assert!(matches!(e, Error::Usage { .. }), "{shape:?} {dims:?}: {e}");
        }
    });
}

#[test]
fn tiles_beyond_the_memory_are_refused_before_anything_is_launched() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<f32>(world, 100).unwrap();
        let mut reduce = |tile: Tile, root: usize, way: Algorithm| {
            let into = TileMut::dense(out.view_mut());
            x.tile_reduce(SUM, tile, root, into, way, stream).unwrap_err().to_string()
        };
        let tile = Tile { first: 0, rows: 10, columns: 10, pitch: 10 };
        let auto = Algorithm::Auto;
        let e = reduce(Tile { first: 1, ..tile }, 0, auto);
        assert!(e.contains("within the 100 elements of each rank"), "{e}");
        let e = reduce(Tile { columns: 11, ..tile }, 0, auto);
        assert!(e.contains("tiles of one matrix"), "{e}");
        assert!(reduce(tile, 2, auto).contains("rank"));
        assert!(reduce(tile, 0, Algorithm::TwoShot).contains("Auto or Multimem"));
        let e = reduce(tile, 0, Algorithm::Multimem);
        assert!(e.contains("multicast for tile_reduce"), "{e}");
        let mut short = gpu.alloc::<f32>(world, 99).unwrap();
        let into = TileMut::dense(short.view_mut());
        let both = [tile, tile];
        let e = x.multi_root_tile_reduce(SUM, &both, &[0, 0], into, auto, stream).unwrap_err();
        assert!(e.to_string().contains("at most one tile"), "{e}");
        let into = TileMut::dense(short.view_mut());
        let e = x.multi_root_tile_reduce(SUM, &both, &[0, 1], into, auto, stream).unwrap_err();
        assert!(e.to_string().contains("room for 10 rows"), "{e}");
        let mut y = gpu.alloc::<i32>(world, 100).unwrap().rendezvous(world).unwrap();
        let mut whole = gpu.alloc::<i32>(world, 100).unwrap();
        let into = TileMut::dense(whole.view_mut());
        let e = y.tile_reduce(SUM, tile, 0, into, auto, stream).unwrap_err();
        assert!(e.to_string().contains("f32, f16 or bf16"), "{e}");
        let shape = (10, 10, 10);
        for (ends, owners) in
            [(vec![5, 4, 10], vec![0, 1, 0]), (vec![11], vec![0]), (vec![5], vec![2])]
        {
            let mut none = [];
            let (ends, owners) = (Some(&ends[..]), Some(&owners[..]));
            x.reduce_scatter_offset(SUM, shape, 0, ends, owners, &mut none, auto, stream)
                .unwrap_err();
        }
        assert_eq!(driver.launches(), []);
    });
}
