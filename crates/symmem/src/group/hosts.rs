//! The members of a group by host.

use super::Group;
use super::context::Context;
use super::staging::{self, STAGE};
use crate::error::{Error, Result};

/// How the ranks of a group that spans hosts are spread over them. The same on all ranks, but for the own place.
pub(crate) struct Span {
    /// The ranks of each host in ascending order; the hosts in the order of their first ranks.
    hosts: Vec<Vec<usize>>,
    /// This rank's host, and its place among the ranks there.
    own: (usize, usize),
}

impl Span {
    /// Of these ranks of the world, in group order.
    pub(super) fn new(context: &Context, members: &[usize]) -> Self {
        let known = context.mesh.hosts();
        Self::by(members.len(), |rank| members.get(rank).and_then(|&m| known.number(m)), {
            members.iter().position(|&member| member == context.mesh.rank()).unwrap_or(0)
        })
    }

    fn by(ranks: usize, host_of: impl Fn(usize) -> Option<usize>, own: usize) -> Self {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for rank in 0..ranks {
            let is_there =
                |host: &&mut Vec<usize>| host.first().map(|&r| host_of(r)) == Some(host_of(rank));
            match hosts.iter_mut().find(is_there) {
                Some(host) => host.push(rank),
                None => hosts.push(vec![rank]),
            }
        }
        let place = |host: &Vec<usize>| host.iter().position(|&rank| rank == own);
        let own = hosts.iter().enumerate().find_map(|(i, host)| place(host).map(|at| (i, at)));
        Self { own: own.unwrap_or_default(), hosts }
    }

    /// The ranks of each host.
    pub(crate) fn hosts(&self) -> &[Vec<usize>] {
        &self.hosts
    }

    /// The number of this rank's host, and its place among the ranks there.
    pub(crate) fn own(&self) -> (usize, usize) {
        self.own
    }

    /// Whether each rank is alone on its host.
    pub(crate) fn is_one_each(&self) -> bool {
        self.hosts.iter().all(|host| host.len() == 1)
    }

    /// For how many bytes a staging buffer has room, where there are several hosts; and those in the pads of ranks.
    pub(super) fn room(&self) -> usize {
        let ranks = self.hosts.iter().map(Vec::len).sum();
        staging::room(ranks, self.hosts.len(), self.shared_mirrors() > 0)
    }

    pub(super) fn room_in_pads(&self) -> usize {
        // Nobody reads the staging buffers of a rank that is alone on its host.
        match &self.hosts[..] {
            [host] => staging::stage_within_host(host.len()),
            _ if self.is_one_each() => STAGE,
            _ => self.room(),
        }
    }

    /// How many mirrors a rank shares with its host: of one rank of each other host, where hosts have as many ranks each, and several.
    pub(super) fn shared_mirrors(&self) -> usize {
        let are_shared = !self.is_one_each() && self.ranks_per_host().is_some();
        if are_shared { self.hosts.len() - 1 } else { 0 }
    }

    /// The rank of this host that shares its mirror of `rank`, of another one, and the number of this mirror among those that it shares.
    pub(super) fn hearer(&self, rank: usize) -> Option<(usize, usize)> {
        let (host, place) = self.hosts.iter().enumerate().find_map(|(number, host)| {
            Some((number, host.iter().position(|&there| there == rank)?))
        })?;
        let hearer = *self.hosts.get(self.own.0)?.get(place)?;
        let number = host.checked_sub(usize::from(host > self.own.0))?;
        (self.shared_mirrors() > 0 && host != self.own.0).then_some((hearer, number))
    }

    /// Whether `hearer` shares its mirror of `rank`.
    pub(super) fn hears(&self, hearer: usize, rank: usize) -> bool {
        self.hearer(rank).is_some_and(|(rank, _)| rank == hearer)
    }

    /// Whether other ranks are on this one's host.
    pub(crate) fn has_neighbours(&self) -> bool {
        self.hosts.get(self.own.0).is_some_and(|host| host.len() > 1)
    }

    /// How many ranks each host has, if that is the same number.
    pub(crate) fn ranks_per_host(&self) -> Option<usize> {
        let first = self.hosts.first()?.len();
        self.hosts.iter().all(|host| host.len() == first).then_some(first)
    }

    /// Whether the ranks of each host follow each other.
    pub(crate) fn is_in_blocks(&self) -> bool {
        self.hosts.iter().flatten().enumerate().all(|(i, &rank)| i == rank)
    }
}

impl Group {
    /// The ranks of the group by host: the hosts in the order of their first ranks in the world, the ranks of each in
    /// ascending order. A rank reaches the memory of those on its own host.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| {
    /// assert_eq!(world.hosts(), [[0, 1]]); // threads of one process are on one host
    /// # })?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn hosts(&self) -> Vec<Vec<usize>> {
        let hosts = self.context().mesh.hosts();
        let mut members: Vec<(Option<usize>, usize)> = self
            .world_ranks()
            .iter()
            .enumerate()
            .map(|(rank, &member)| (hosts.number(member), rank))
            .collect();
        members.sort_unstable();
        let of_one =
            |ranks: &[(Option<usize>, usize)]| ranks.iter().map(|(_, rank)| *rank).collect();
        members.chunk_by(|(a, _), (b, _)| a == b).map(of_one).collect()
    }

    /// Whether `rank` of this group is on this rank's host; false if there is no such rank.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| {
    /// assert!(world.is_local(1) && !world.is_local(2));
    /// # })?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn is_local(&self, rank: usize) -> bool {
        let mesh = &self.context().mesh;
        self.world_ranks().get(rank).is_some_and(|&member| mesh.is_local(member))
    }

    /// A new group of this group's ranks on this rank's host, as [`Group::subgroup`] makes it: called by all ranks of the
    /// host. Everything works in it, also where this group spans several hosts.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let here = world.host_group()?;
    /// let mut sum = [1.0_f32];
    /// here.all_reduce(&mut sum, symmem::ReduceOp::Sum)?;
    /// assert_eq!(sum, [here.size() as f32]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn host_group(&self) -> Result<Group> {
        let here: Vec<usize> = (0..self.size()).filter(|&rank| self.is_local(rank)).collect();
        self.subgroup(&here)
    }

    /// Whether some members are on other hosts; of a group that is formed.
    pub(crate) fn spans_hosts(&self) -> bool {
        self.0.health.formed.get().is_some_and(|formed| formed.signals.spans())
    }

    /// The first rank that is not on the host of rank 0. The same on all ranks.
    #[cfg(feature = "cuda")]
    pub(crate) fn first_beyond(&self) -> Option<usize> {
        let hosts = self.context().mesh.hosts();
        let first = self.world_ranks().first()?;
        self.world_ranks().iter().position(|&member| !hosts.are_together(*first, member))
    }

    /// The error for a pointer to the host memory of a rank on another host.
    pub(crate) fn out_of_reach(&self, rank: usize) -> Error {
        let member = self.world_ranks().get(rank).copied().unwrap_or_default();
        if self.is_local(rank) {
            return super::no_descriptor();
        }
        Error::Unavailable {
            what: format!("a pointer to the memory of rank {rank}"),
            why: format!(
                "it is on another host ({}); get and put reach it, and so do signals and collectives",
                self.context().mesh.hosts().name(member)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(host_of: &[usize], own: usize) -> Span {
        Span::by(host_of.len(), |rank| host_of.get(rank).copied(), own)
    }

    #[test]
    fn hosts_are_in_the_order_of_their_first_ranks() {
        let spread = span(&[7, 3, 7, 3, 3], 4);
        assert_eq!((spread.hosts(), spread.own()), (&[vec![0, 2], vec![1, 3, 4]][..], (1, 2)));
        assert!(spread.ranks_per_host().is_none() && !spread.is_in_blocks());
        let blocks = span(&[5, 5, 2, 2], 1);
        assert_eq!((blocks.ranks_per_host(), blocks.own()), (Some(2), (0, 1)));
        assert!(blocks.is_in_blocks() && !span(&[0, 1, 0, 1], 0).is_in_blocks());
    }

    #[test]
    fn the_rank_at_the_same_place_shares_its_mirror_where_hosts_have_as_many_ranks() {
        let three = span(&[0, 0, 1, 1, 2, 2], 2);
        let heard: Vec<_> = (0..6).map(|rank| three.hearer(rank)).collect();
        assert_eq!(heard, [Some((2, 0)), Some((3, 0)), None, None, Some((2, 1)), Some((3, 1))]);
        assert!(three.hears(2, 4) && !three.hears(3, 4) && !three.hears(2, 3));
        assert_eq!((three.shared_mirrors(), three.hearer(6)), (2, None));
        for alone in [span(&[0, 1, 1], 1), span(&[0, 1, 2], 1), span(&[0, 0, 0], 1)] {
            assert_eq!((alone.shared_mirrors(), alone.hearer(0)), (0, None));
        }
    }
}
