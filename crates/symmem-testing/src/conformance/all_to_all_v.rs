//! What the all-to-all with splits promises: compared with queues of rows, pushed one by one.

use symmem::{Error, Symmetric, World};

use crate::Random;

/// A row of `row_len` elements that tells where it came from.
fn row(row_len: usize, source: usize, index: usize) -> Vec<u32> {
    (0..row_len).map(|column| (source * 1_000_000 + index * 100 + column) as u32).collect()
}

/// Splits of all ranks, the same on all: `entries` for each, many of them 0.
fn splits(random: &mut Random, ranks: usize, entries: usize) -> Vec<Vec<i64>> {
    let mut split = || (random.below(9) as i64 - 3).max(0);
    (0..ranks).map(|_| (0..entries).map(|_| split()).collect()).collect()
}

fn symmetric<T: symmem::Element>(world: &World, len: usize, values: &[T]) -> Symmetric<T> {
    let mut x = world.alloc::<T>(len).unwrap().rendezvous(world).unwrap();
    x.local_mut()[..values.len()].copy_from_slice(values);
    x
}

/// What each source has for each expert of `rank`: a queue of rows, by expert and source.
fn queues(splits: &[Vec<i64>], ranks: usize, row_len: usize, rank: usize) -> Vec<Vec<Vec<u32>>> {
    let experts = splits[0].len() / ranks;
    let mut queues = vec![vec![Vec::new(); ranks]; experts];
    for (source, splits) in splits.iter().enumerate() {
        let mut index = 0;
        for (at, rows) in splits.iter().enumerate() {
            for _ in 0..*rows {
                if at / experts == rank {
                    queues[at % experts][source].extend(row(row_len, source, index));
                }
                index += 1;
            }
        }
    }
    queues
}

fn input(splits: &[i64], row_len: usize, rank: usize) -> Vec<u32> {
    let rows = splits.iter().sum::<i64>() as usize;
    (0..rows).flat_map(|index| row(row_len, rank, index)).collect()
}

/// Random splits, zeros among them, one row after the other to where it belongs.
pub fn rows_go_to_the_ranks_they_are_for(world: World) {
    let n = world.size();
    let mut random = Random(7);
    for row_len in [1, 3, 16] {
        let splits = splits(&mut random, n, n);
        let own = &splits[world.rank()];
        let mut x = symmetric(&world, 8 * n * row_len, &input(own, row_len, world.rank()));
        let mut out = vec![u32::MAX; 8 * n * row_len];
        let mut received = vec![-1; 2 * n];
        let mut splits_here = symmetric(&world, n, own);
        x.all_to_all_v(row_len, &mut splits_here, &mut out, &mut received).unwrap();
        let mut at = 0;
        for (source, rows) in queues(&splits, n, row_len, world.rank())[0].iter().enumerate() {
            assert_eq!(received[source] as usize, rows.len() / row_len);
            assert_eq!(received[n + source] as usize, at / row_len);
            assert_eq!(&out[at..at + rows.len()], rows);
            at += rows.len();
        }
        assert!(out[at..].iter().all(|v| *v == u32::MAX), "nothing else is written");
    }
}

/// To the experts, aligned, and back to where every row came from.
pub fn experts_get_their_rows_and_give_them_back(world: World) {
    let (n, own) = (world.size(), world.rank());
    let mut random = Random(11);
    for (experts, align) in [(1, 1), (2, 1), (3, 4), (5, 8), (40, 16)] {
        let row_len = 4;
        let splits = splits(&mut random, n, n * experts);
        let capacity = (6 * n + align) * experts * n;
        let sent = input(&splits[own], row_len, own);
        let mut x = symmetric(&world, capacity * row_len, &sent);
        let mut experts_rows = symmetric::<u32>(&world, capacity * row_len, &[]);
        let mut there = symmetric::<i64>(&world, 2 * n * experts, &[]);
        let mut splits_here = symmetric(&world, n * experts, &splits[own]);
        let (out, received) = (experts_rows.local_mut(), there.local_mut());
        x.all_to_all_v_2d(row_len, &mut splits_here, align, out, received).unwrap();

        let mut begin = 0;
        for (expert, sources) in queues(&splits, n, row_len, own).iter().enumerate() {
            let mut at = begin;
            for (source, rows) in sources.iter().enumerate() {
                let index = expert * n + source;
                assert_eq!(received[index] as usize, rows.len() / row_len);
                assert_eq!(received[n * experts + index] as usize, at);
                assert_eq!(&out[at * row_len..at * row_len + rows.len()], rows);
                at += rows.len() / row_len;
            }
            begin += (at - begin).div_ceil(align).max(1) * align;
        }

        let mut back = vec![u32::MAX; capacity * row_len];
        let mut returned = vec![-1; 2 * n * experts];
        experts_rows.all_to_all_v_2d_offset(row_len, &mut there, &mut back, &mut returned).unwrap();
        assert_eq!(&back[..sent.len()], sent);
        assert!(back[sent.len()..].iter().all(|v| *v == u32::MAX));
        assert_eq!(&returned[..n * experts], splits[own]);
        let mut at = 0;
        for (rows, offset) in splits[own].iter().zip(&returned[n * experts..]) {
            assert_eq!(*offset, at);
            at += rows;
        }
    }
}

/// What does not fit one rank is refused by all, with nothing written, and the next call works.
pub fn rows_that_do_not_fit_are_refused_by_every_rank(world: World) {
    let n = world.size();
    let text = |r: symmem::Result<()>| r.unwrap_err().to_string();
    let mut x = symmetric::<u32>(&world, 10 * n, &[]);
    let mut splits = symmetric::<i64>(&world, n, &vec![2; n]);
    let mut received = vec![0; 2 * n];
    let mut out = vec![9; 2 * n];

    // Rank 0 would get three rows from rank 1: one more than there is room for.
    splits.local_mut()[0] = if world.rank() == 1 { 3 } else { 2 };
    let e = text(x.all_to_all_v(1, &mut splits, &mut out, &mut received));
    assert!(e.contains("holds the rows for rank 0"), "{e}");
    splits.local_mut()[0] = if world.rank() == 1 { -1 } else { 2 };
    let e = text(x.all_to_all_v(1, &mut splits, &mut out, &mut received));
    assert!(e.contains("splits of rank 1 that are not negative, got -1"), "{e}");
    splits.local_mut()[0] = if world.rank() == 1 { i64::MAX } else { 2 };
    let e = text(x.all_to_all_v(1, &mut splits, &mut out, &mut received));
    assert!(e.contains("splits of rank 1 within its"), "{e}");
    assert!(out.iter().all(|v| *v == 9) && received.iter().all(|v| *v == 0));

    splits.local_mut()[0] = 2;
    let e = text(x.all_to_all_v(0, &mut splits, &mut out, &mut received));
    assert!(e.contains("a row length of at least 1"), "{e}");
    let e = text(x.all_to_all_v_2d(1, &mut splits, 0, &mut out, &mut received));
    assert!(e.contains("an alignment of at least 1"), "{e}");
    let e = text(x.all_to_all_v(1, &mut splits, &mut out, &mut [0]));
    assert!(e.contains("splits and offsets received of"), "{e}");
    let differs = x.all_to_all_v(1 + world.rank(), &mut splits, &mut out, &mut received);
    assert!(matches!(differs, Err(Error::Mismatch { .. })), "{differs:?}");
    x.all_to_all_v(1, &mut splits, &mut out, &mut received).unwrap();
    assert!(out.iter().all(|v| *v == 0));
}
