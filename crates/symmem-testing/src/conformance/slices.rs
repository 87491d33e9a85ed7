//! What the collectives on ordinary memory promise.

use symmem::{Error, ReduceOp, World};

/// Elements of a length that needs several pieces on the desks, different for each rank.
const LONG: usize = 300_007;

fn value(rank: usize, i: usize) -> f32 {
    ((i * 31 + rank * 1009) % 4099) as f32 / 7.0 - 250.0
}

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| value(rank, i)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Collectives on slices give the bits of those on symmetric memory, whatever the length.
pub fn slices_give_the_bits_of_symmetric_memory(world: World) {
    let (n, own) = (world.size(), world.rank());
    for block in [0, 1, 33, LONG / n] {
        let input = values(own, n * block);
        let mut x = world.alloc::<f32>(n * block).unwrap().rendezvous(&world).unwrap();
        x.local_mut().copy_from_slice(&input);

        let (mut sums, mut expected) = (input.clone(), vec![0.0; n * block]);
        world.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
        x.all_reduce_into(ReduceOp::Sum, &mut expected).unwrap();
        assert_eq!(bits(&sums), bits(&expected), "all_reduce of {n} times {block}");

        let (mut sums, mut expected) = (vec![0.0; block], vec![0.0; block]);
        world.reduce_scatter(&input, ReduceOp::Average, &mut sums).unwrap();
        x.reduce_scatter(ReduceOp::Average, &mut expected).unwrap();
        assert_eq!(bits(&sums), bits(&expected), "reduce_scatter of {n} times {block}");

        let (mut blocks, mut expected) = (vec![0.0; n * block], vec![0.0; n * block]);
        world.all_to_all(&input, &mut blocks).unwrap();
        x.all_to_all(&mut expected).unwrap();
        assert_eq!(bits(&blocks), bits(&expected), "all_to_all of {n} times {block}");

        let mut all = vec![0.0; n * n * block];
        world.all_gather(&input, &mut all).unwrap();
        let expected: Vec<f32> = (0..n).flat_map(|r| values(r, n * block)).collect();
        assert_eq!(bits(&all), bits(&expected), "all_gather of {n} times {block}");

        for root in 0..n {
            let mut data = input.clone();
            world.broadcast(&mut data, root).unwrap();
            assert_eq!(bits(&data), bits(&values(root, n * block)), "broadcast from {root}");
        }
    }
    let mut bytes = vec![own as u8 + 1; 3 << 20];
    world.all_reduce(&mut bytes, ReduceOp::Max).unwrap();
    assert!(bytes.iter().all(|b| *b == n as u8), "of another type, on the same desks");
}

/// Every group has desks of its own, which go with it.
pub fn slices_of_different_groups_do_not_meet(world: World) {
    for _ in 0..3 {
        let pair = world.subgroup(&[world.rank()]).unwrap();
        let mut alone = [world.rank() as u64];
        pair.all_reduce(&mut alone, ReduceOp::Sum).unwrap();
        assert_eq!(alone, [world.rank() as u64]);
        let mut together = alone;
        world.all_reduce(&mut together, ReduceOp::Sum).unwrap();
        assert_eq!(together[0], (0..world.size() as u64).sum::<u64>());
    }
}

/// Wrong lengths, roots and operators are refused; ranks that differ all learn it; the next call works.
pub fn bad_calls_with_slices_are_named(world: World) {
    let n = world.size();
    let text = |r: symmem::Result<()>| r.unwrap_err().to_string();
    let mut data = values(world.rank(), 2 * n);
    assert!(text(world.all_reduce(&mut data, ReduceOp::Or)).contains("an operator that f32 has"));
    assert!(text(world.broadcast(&mut data, n)).contains("a rank in [0"));
    assert!(text(world.all_gather(&data, &mut [0.0])).contains("an output of"));
    assert!(text(world.all_to_all(&data, &mut [0.0])).contains("an output of"));
    let odd = vec![0.0; n + 1];
    let divisible = text(world.reduce_scatter(&odd, ReduceOp::Sum, &mut [0.0]));
    assert!(divisible.contains("divisible by the"), "{divisible}");
    let before = bits(&data);
    let e = world.all_reduce(&mut data[world.rank()..], ReduceOp::Sum).unwrap_err();
    assert!(matches!(e, Error::Mismatch { op: "all_reduce", .. }), "{e}");
    assert_eq!(bits(&data), before);
    world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    world.barrier().unwrap();
}
