//! Reductions: the bits of their definition, for every type, operator, algorithm, length and offset.

use symmem::{DType, ReduceOp, with_element};
use symmem_chaos::element::Plain;

use super::platform::{Call, Memory, Platform, Way};
use super::{reduced, same, source};

/// All ways of reducing all elements give the bits of the definition, on every rank.
fn reduces<T: Plain, P: Platform>(platform: &P, x: &mut P::Memory<T>, len: usize, op: ReduceOp) {
    let world = platform.world();
    let data: Vec<T> = source(len).elements(world.rank(), len);
    let expected = reduced(world, source(len), op, len);
    for &way in platform.ways::<T>() {
        x.write(&data);
        x.all_reduce(op, way).unwrap();
        same(&x.read().unwrap(), &expected, &format!("{op} of {len} by {way:?}"));
    }
    x.write(&data);
    let mut out = data.clone();
    x.call(Call::AllReduce(op), &mut out).unwrap();
    same(&out, &expected, &format!("{op} of {len} into other memory"));
    let root = world.size() - 1;
    out.copy_from_slice(&data);
    x.call(Call::Reduce(op, root), &mut out).unwrap();
    let expected = if world.rank() == root { &expected } else { &data };
    same(&out, expected, &format!("{op} of {len} to the last rank"));
    same(&x.read().unwrap(), &data, "the input");
}

/// Every operator that the type has. The others are refused, and the next call works.
fn operators<T: Plain>(platform: &impl Platform, lengths: &[usize]) {
    for &len in lengths {
        let mut x = platform.memory::<T>(platform.world(), len).unwrap();
        for op in ReduceOp::ALL {
            if op.applies_to(T::DTYPE.kind()) {
                reduces(platform, &mut x, len, op);
                continue;
            }
            let e = x.all_reduce(op, Way::Auto).unwrap_err().to_string();
            assert!(e.contains(&format!("an operator that {} has, got {op}", T::DTYPE)), "{e}");
        }
    }
}

/// Ranks in order; floats of 8 and 16 bits are computed in f32 and rounded once.
pub fn reductions_give_the_bits_of_their_definition(platform: &impl Platform) {
    for &dtype in DType::ALL {
        let many = matches!(dtype, DType::F32 | DType::BF16);
        let lengths: &[usize] = if many { &[0, 1, 7, 64, 1000] } else { &[1, 333] };
        with_element!(dtype, T => operators::<T>(platform, lengths)).unwrap();
    }
}

/// Around the sizes at which the algorithm changes: on the host the line of the flag and the staging buffer, on devices what
/// is sent with flags.
pub fn every_way_gives_the_same_bits_around_its_limits(platform: &impl Platform) {
    let small = [5, 6, 7, 127, 128, 160, 192, 193, 256, 320, 2047, 4095, 4096, 4097, 9000];
    for len in small.into_iter().chain([32_767, 32_769, 58_253, 58_255, 131_075]) {
        let mut x = platform.memory::<f32>(platform.world(), len).unwrap();
        reduces(platform, &mut x, len, ReduceOp::Sum);
        let mut x = platform.memory::<u8>(platform.world(), len).unwrap();
        reduces(platform, &mut x, len, ReduceOp::Max);
    }
}

/// Collectives keep to their memory where it begins within an allocation, at another offset on each rank.
pub fn parts_of_a_pool_are_reduced_where_they_lie(platform: &impl Platform) {
    let (world, own) = (platform.world(), platform.world().rank());
    let pool = platform.pool(2 << 20);
    let _shift = platform.cut::<u8>(&pool, 300 * (own + 1)).unwrap();
    for len in [3, 5000, 58_300] {
        let cut = |len: usize, value: u8| {
            let buffer = platform.cut::<u8>(&pool, len).unwrap();
            let mut memory = platform.rendezvous(buffer, world).unwrap();
            memory.write(&vec![value; len]);
            memory
        };
        let before = cut(300, 0xaa);
        let buffer = platform.cut::<i32>(&pool, len).unwrap();
        assert_ne!(platform.at(&buffer).1, 0);
        let mut x = platform.rendezvous(buffer, world).unwrap();
        let after = cut(300, 0xbb);
        reduces(platform, &mut x, len, ReduceOp::Sum);
        let data = |rank: usize| source(len).elements::<i32>(rank, len);
        x.write(&data(own));
        let mut all = vec![0; world.size() * len];
        x.call(Call::AllGather, &mut all).unwrap();
        same(&all, &(0..world.size()).flat_map(data).collect::<Vec<_>>(), "all_gather");
        x.broadcast(world.size() - 1).unwrap();
        same(&x.read().unwrap(), &data(world.size() - 1), "broadcast");
        assert_eq!(before.read().unwrap(), [0xaa; 300]);
        assert_eq!(after.read().unwrap(), [0xbb; 300]);
        world.barrier().unwrap();
    }
}
