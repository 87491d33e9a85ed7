//! Collectives on slices, and whether they gave what they should.

use symmem::{Group, ReduceOp, with_element};

use crate::element::Plain;
use crate::lane::Runner;
use crate::program::Op;

/// The first place where two differ, in words.
pub fn difference<T: Plain>(got: &[T], expected: impl Iterator<Item = T>) -> Option<String> {
    let mut count = 0;
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        count += 1;
        if got.raw() != expected.raw() {
            return Some(format!("element {i} is {got:?} and not {expected:?}"));
        }
    }
    (count != got.len()).then(|| format!("{count} of {} elements", got.len()))
}

pub fn run(runner: &mut Runner<'_>, op: &Op) {
    let group = runner.group.clone();
    match *op {
        Op::AllReduce { dtype, len, op } => {
            with_element!(dtype, T => all_reduce::<T>(runner, &group, len, op));
        }
        Op::AllGather { dtype, len } => {
            with_element!(dtype, T => all_gather::<T>(runner, &group, len));
        }
        Op::ReduceScatter { dtype, len, op } => {
            with_element!(dtype, T => reduce_scatter::<T>(runner, &group, len, op));
        }
        Op::Broadcast { dtype, len, root } => {
            with_element!(dtype, T => broadcast::<T>(runner, &group, len, root));
        }
        Op::AllToAll { dtype, len } => {
            with_element!(dtype, T => all_to_all::<T>(runner, &group, len));
        }
        Op::Reduce { dtype, len, op, root } => {
            with_element!(dtype, T => reduce::<T>(runner, &group, len, op, root));
        }
        Op::Gather { dtype, len, root } => {
            with_element!(dtype, T => gather::<T>(runner, &group, len, root));
        }
        Op::Scatter { dtype, len, root } => {
            with_element!(dtype, T => scatter::<T>(runner, &group, len, root));
        }
        Op::Scan { dtype, len, op, exclusive } => {
            with_element!(dtype, T => scan::<T>(runner, &group, len, op, exclusive));
        }
        Op::AllToAllV { dtype, len } => {
            with_element!(dtype, T => all_to_all_v::<T>(runner, &group, len));
        }
        _ => {}
    }
}

pub fn all_reduce<T: Plain>(runner: &mut Runner<'_>, group: &Group, len: usize, op: ReduceOp) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let mut data = source.elements::<T>(runner.own.rank, len);
    let name = format!("all_reduce[{},{len},{op}]", T::DTYPE);
    let check = |data: &Vec<T>| difference(data, (0..len).map(|i| source.reduced(ranks, op, i)));
    runner.timed(group, name, || group.all_reduce(&mut data, op).map(|()| data), check);
}

fn all_gather<T: Plain>(runner: &mut Runner<'_>, group: &Group, len: usize) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let input = source.elements::<T>(runner.own.rank, len);
    let mut out = source.elements::<T>(99, len * ranks.len());
    let name = format!("all_gather[{},{len}]", T::DTYPE);
    let all = ranks.iter().flat_map(|&rank| source.elements::<T>(rank, len));
    let check = |out: &Vec<T>| difference(out, all);
    runner.timed(group, name, || group.all_gather(&input, &mut out).map(|()| out), check);
}

fn reduce_scatter<T: Plain>(runner: &mut Runner<'_>, group: &Group, block: usize, op: ReduceOp) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let input = source.elements::<T>(runner.own.rank, block * ranks.len());
    let mut out = source.elements::<T>(99, block);
    let name = format!("reduce_scatter[{},{block},{op}]", T::DTYPE);
    let first = group.rank() * block;
    let expected = (first..first + block).map(|i| source.reduced(ranks, op, i));
    let check = |out: &Vec<T>| difference(out, expected);
    runner.timed(group, name, || group.reduce_scatter(&input, op, &mut out).map(|()| out), check);
}

fn broadcast<T: Plain>(runner: &mut Runner<'_>, group: &Group, len: usize, root: usize) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let root = root % ranks.len();
    let mut data = source.elements::<T>(runner.own.rank, len);
    let name = format!("broadcast[{},{len},{root}]", T::DTYPE);
    let expected = source.elements::<T>(ranks[root], len).into_iter();
    let check = |data: &Vec<T>| difference(data, expected);
    runner.timed(group, name, || group.broadcast(&mut data, root).map(|()| data), check);
}

fn all_to_all<T: Plain>(runner: &mut Runner<'_>, group: &Group, block: usize) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let n = ranks.len();
    let input = source.elements::<T>(runner.own.rank, n * block);
    let mut out = source.elements::<T>(99, n * block);
    let name = format!("all_to_all[{},{block}]", T::DTYPE);
    let first = group.rank() * block;
    let expected = ranks
        .iter()
        .flat_map(|&rank| source.elements::<T>(rank, n * block)[first..first + block].to_vec());
    let check = |out: &Vec<T>| difference(out, expected);
    runner.timed(group, name, || group.all_to_all(&input, &mut out).map(|()| out), check);
}

fn reduce<T: Plain>(runner: &mut Runner<'_>, group: &Group, len: usize, op: ReduceOp, root: usize) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let root = root % ranks.len();
    let input = source.elements::<T>(runner.own.rank, len);
    let mut out = source.elements::<T>(99, if group.rank() == root { len } else { 0 });
    let name = format!("reduce[{},{len},{op},{root}]", T::DTYPE);
    let expected = (0..out.len()).map(|i| source.reduced(ranks, op, i));
    let check = |out: &Vec<T>| difference(out, expected);
    runner.timed(group, name, || group.reduce(&input, op, root, &mut out).map(|()| out), check);
}

fn gather<T: Plain>(runner: &mut Runner<'_>, group: &Group, len: usize, root: usize) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let root = root % ranks.len();
    let is_root = group.rank() == root;
    let input = source.elements::<T>(runner.own.rank, len);
    let mut out = source.elements::<T>(99, if is_root { len * ranks.len() } else { 0 });
    let name = format!("gather[{},{len},{root}]", T::DTYPE);
    let all = ranks.iter().filter(|_| is_root);
    let all = all.flat_map(|&rank| source.elements::<T>(rank, len));
    let check = |out: &Vec<T>| difference(out, all);
    runner.timed(group, name, || group.gather(&input, root, &mut out).map(|()| out), check);
}

fn scatter<T: Plain>(runner: &mut Runner<'_>, group: &Group, block: usize, root: usize) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let root = root % ranks.len();
    let blocks = source.elements::<T>(ranks[root], block * ranks.len());
    let mut out = source.elements::<T>(99, block);
    let name = format!("scatter[{},{block},{root}]", T::DTYPE);
    let first = group.rank() * block;
    let expected = blocks[first..first + block].iter().copied();
    let check = |out: &Vec<T>| difference(out, expected);
    let input = if group.rank() == root { &blocks[..] } else { &[] };
    runner.timed(group, name, || group.scatter(input, root, &mut out).map(|()| out), check);
}

fn scan<T: Plain>(
    runner: &mut Runner<'_>,
    group: &Group,
    len: usize,
    op: ReduceOp,
    exclusive: bool,
) {
    // There is no average of some of the ranks.
    let op = if op == ReduceOp::Average { ReduceOp::Sum } else { op };
    let (source, ranks) = (runner.source(), group.world_ranks());
    let mut data = source.elements::<T>(runner.own.rank, len);
    let name = format!("scan[{},{len},{op},{exclusive}]", T::DTYPE);
    let up_to = if exclusive { group.rank().max(1) } else { group.rank() + 1 };
    let expected = (0..len).map(|i| source.reduced(&ranks[..up_to], op, i));
    let check = |data: &Vec<T>| difference(data, expected);
    let call = || match exclusive {
        true => group.exclusive_scan(&mut data, op).map(|()| data),
        false => group.scan(&mut data, op).map(|()| data),
    };
    runner.timed(group, name, call, check);
}

fn all_to_all_v<T: Plain>(runner: &mut Runner<'_>, group: &Group, len: usize) {
    let (source, ranks) = (runner.source(), group.world_ranks());
    let count = |from: usize, to: usize| (from * 5 + to * 3 + 1) % 4 * len / 3;
    let first = |from: usize, to: usize| (0..to).map(|to| count(from, to)).sum::<usize>();
    let (own, n) = (group.rank(), ranks.len());
    let counts: Vec<usize> = (0..n).map(|to| count(own, to)).collect();
    let input = source.elements::<T>(runner.own.rank, first(own, n));
    let name = format!("all_to_all_v[{},{len}]", T::DTYPE);
    let expected = ranks.iter().enumerate().flat_map(|(from, &rank)| {
        let sent = source.elements::<T>(rank, first(from, own + 1));
        sent[first(from, own)..].to_vec()
    });
    let check = |(out, received): &(Vec<T>, Vec<usize>)| {
        let lengths = (0..n).all(|from| received[from] == count(from, own));
        let lengths = (!lengths).then(|| format!("{received:?} elements"));
        lengths.or_else(|| difference(out, expected))
    };
    let mut out = Vec::new();
    let call = || group.all_to_all_v(&input, &counts, &mut out).map(|received| (out, received));
    runner.timed(group, name, call, check);
}
