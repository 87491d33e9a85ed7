//! Groups of some ranks of another group.

use std::time::Duration;

use super::Group;
use super::form::Spec;
use crate::dtype::Order;
use crate::error::Result;
use crate::sync::Deadline;

/// Settings of a subgroup: see [`Group::subgroup_builder`]. Those that are not given are as in the parent group.
///
/// ```
/// # use std::time::Duration;
/// # symmem::World::threads(3, |world| -> symmem::Result<()> {
/// if world.rank() < 2 {
///     let pair = world.subgroup_builder(&[0, 1]).name("tp").timeout(Duration::from_secs(5)).build()?;
///     assert_eq!((pair.size(), pair.name()), (2, "tp"));
///     pair.barrier()?;
/// }
/// # Ok(())
/// # })?.into_iter().collect::<symmem::Result<()>>()?;
/// # Ok::<(), symmem::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct GroupBuilder<'g> {
    group: &'g Group,
    ranks: Vec<usize>,
    name: Option<String>,
    signal_pad_size: Option<usize>,
    timeout: Option<Duration>,
    order: Option<Order>,
}

impl GroupBuilder<'_> {
    /// A name, unique among this rank's living groups. It can be used again once the group, and all groups shrunk from it,
    /// are dropped.
    pub fn name(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }

    /// Bytes of a signal pad: 4 for each channel and rank. Decides how many channels the group has.
    pub fn signal_pad_size(self, bytes: usize) -> Self {
        Self { signal_pad_size: Some(bytes), ..self }
    }

    /// The time limit of calls without a deadline of their own; zero means no limit.
    pub fn timeout(self, limit: Duration) -> Self {
        Self { timeout: Some(limit), ..self }
    }

    /// The order in which reductions combine the ranks' elements. All ranks must give the same.
    pub fn order(self, order: Order) -> Self {
        Self { order: Some(order), ..self }
    }

    /// Makes the group, as [`Group::subgroup`] does.
    pub fn build(self) -> Result<Group> {
        let (group, ranks) = (self.group, &self.ranks);
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        sorted.dedup();
        let usable = sorted.len() == ranks.len() && sorted.contains(&group.rank());
        let members: Option<Vec<usize>> =
            sorted.iter().map(|&r| group.world_ranks().get(r).copied()).collect();
        match members.filter(|_| usable) {
            Some(members) => self.form("subgroup", members),
            None => {
                let expected = format!("different ranks in [0, {}), with this one", group.size());
                Err(group.usage("subgroup", expected, format!("{ranks:?}")))
            }
        }
    }

    /// Of ranks of the world, in the order of their ranks in the new group.
    fn form(self, op: &'static str, members: Vec<usize>) -> Result<Group> {
        let (group, name) = (self.group, self.name);
        let context = &group.0.context;
        let spec = Spec {
            op,
            scope: name.clone().unwrap_or_default(),
            label: name.clone().unwrap_or_else(|| format!("ranks {members:?}")),
            _claim: name.map(|name| context.claim_name(name)).transpose()?,
            members,
            pad_size: self.signal_pad_size.unwrap_or_else(|| context.pad_size()),
            limit: self.timeout.map_or(group.deadline(), Deadline::within),
            order: self.order.unwrap_or_else(|| group.order()),
            root: None,
        };
        Group::begin(context, spec)
    }
}

impl Group {
    /// A group of the given ranks of this one; called by exactly those ranks, in any order relative to other groups. Ranks
    /// are numbered in ascending order. Returns at once: the first use of the group waits until all its ranks have called
    /// this ([`Group::ready`] does nothing else).
    ///
    /// ```
    /// # symmem::World::threads(4, |world| -> symmem::Result<()> {
    /// let half = if world.rank() < 2 { [0, 1] } else { [2, 3] };
    /// let group = world.subgroup(&half)?;
    /// assert_eq!(group.world_ranks(), half);
    /// group.barrier()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Group> {
        self.subgroup_builder(ranks).build()
    }

    /// As [`Group::subgroup`], with a name, signal pad size, timeout or order of its own.
    pub fn subgroup_builder(&self, ranks: &[usize]) -> GroupBuilder<'_> {
        GroupBuilder {
            group: self,
            ranks: ranks.to_vec(),
            name: None,
            signal_pad_size: None,
            timeout: None,
            order: None,
        }
    }

    /// A group of the same ranks, with a sequence of calls of its own. All ranks call this equally often.
    pub(crate) fn duplicate(&self, op: &'static str) -> Result<Group> {
        let parent = &self.0.spec;
        let spec = Spec {
            op,
            scope: format!("{:032x} {op}", self.id()?),
            label: format!("{op} of {}", parent.label),
            _claim: None,
            members: parent.members.clone(),
            pad_size: parent.pad_size,
            limit: self.deadline(),
            order: parent.order,
            root: None,
        };
        Group::begin(&self.0.context, spec)
    }

    /// Splits the group as `MPI_Comm_split` does: ranks that give the same `color` form a group, numbered by `key` and, where
    /// keys are equal, by their rank here. A rank that gives `None` is in no new group and gets `None`. Collective.
    ///
    /// ```
    /// # symmem::World::threads(4, |world| -> symmem::Result<()> {
    /// let parity = (world.rank() % 2) as u64;
    /// let group = world.split(Some(parity), -(world.rank() as i64))?.unwrap();
    /// assert_eq!(group.size(), 2);
    /// assert_eq!(group.rank(), usize::from(world.rank() < 2)); // the highest key first
    /// group.barrier()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Group>> {
        let all = self.gather_and("split", (color, key), Ok)?;
        if color.is_none() {
            return Ok(None);
        }
        let of_color =
            all.iter().zip(self.world_ranks()).filter(|((theirs, _), _)| *theirs == color);
        let mut members: Vec<(i64, usize)> =
            of_color.map(|((_, key), &rank)| (*key, rank)).collect();
        members.sort_by_key(|(key, _)| *key); // stable: equal keys stay in the order of ranks
        let members = members.into_iter().map(|(_, rank)| rank).collect();
        self.subgroup_builder(&[]).form("split", members).map(Some)
    }
}
