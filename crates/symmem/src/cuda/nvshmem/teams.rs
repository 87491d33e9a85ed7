//! Teams: the groups that NVSHMEM knows. All of the heap's ranks make a team together, and its ranks lie a constant stride
//! apart.

use symmem_sys::nvshmem::Team;

use super::Heap;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::sync::lock;

/// First PE, stride and number.
type Shape = (i32, i32, i32);

impl Heap {
    /// The team of a group; made when first asked for, which is collective over all of the heap's ranks then.
    pub(crate) fn team(&self, op: &'static str, group: &Group) -> Result<Team> {
        self.check_concurrent(op)?;
        if let Some(team) = self.known_team(group) {
            return Ok(team);
        }
        let shape = self.shape(op, group)?;
        self.make_teams(Some(shape))?;
        let made = lock(&self.state).teams.get(&shape).copied().flatten();
        made.ok_or_else(|| too_many(shape, "it was not made"))
    }

    /// The team of a group, if there is one already. The same on all ranks of the group.
    pub(crate) fn known_team(&self, group: &Group) -> Option<Team> {
        let pes = self.pes("team", group).ok()?;
        if pes.len() == self.members.len() {
            return Some(Team::WORLD);
        }
        lock(&self.state).teams.get(&shape(&pes)?).copied().flatten()
    }

    fn shape(&self, op: &'static str, group: &Group) -> Result<Shape> {
        let pes = self.pes(op, group)?;
        shape(&pes).ok_or_else(|| {
            let rule = "a team has more than one rank, a constant stride apart";
            let why = format!("{rule}, and these are {pes:?}");
            Error::unavailable(format!("{op} by NVSHMEM on {group:?}"), why)
        })
    }

    /// Makes the teams that ranks want, all ranks all of them in the same order. Collective over the heap's group.
    pub(crate) fn make_teams(&self, wanted: Option<Shape>) -> Result<()> {
        const OP: &str = "make_team";
        self.check_concurrent(OP)?;
        let group = self.group(OP)?;
        group.gather_and(OP, wanted, |wanted| {
            let mut shapes: Vec<Shape> = wanted.into_iter().flatten().collect();
            shapes.sort_unstable();
            shapes.dedup();
            shapes.into_iter().try_for_each(|shape| self.make_team(shape))
        })
    }

    fn make_team(&self, shape: Shape) -> Result<()> {
        if lock(&self.state).teams.contains_key(&shape) {
            return Ok(());
        }
        let (start, stride, size) = shape;
        let made = self.call(|library| library.split(Team::WORLD, start, stride, size));
        let team = made.map_err(|e| too_many(shape, &e.to_string()))?;
        lock(&self.state).teams.insert(shape, team);
        Ok(())
    }

    /// The shape of a group's team, for a rank that creates it in advance.
    pub(crate) fn shape_of(&self, group: &Group) -> Result<Shape> {
        self.shape("make_team", group)
    }

    /// Refuses what has kernels of NVSHMEM's wait for each other where they take turns.
    pub(crate) fn check_concurrent(&self, op: &'static str) -> Result<()> {
        if !self.in_turns {
            return Ok(());
        }
        Err(Error::unavailable(
            format!("{op} by NVSHMEM"),
            "ranks share a device and use it in turns; it needs MPS, with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE so \
                  that all ranks of a device stay within 100",
        ))
    }
}

/// The constant stride between PEs, of which there are more than one.
fn shape(pes: &[usize]) -> Option<Shape> {
    let (&first, &second) = (pes.first()?, pes.get(1)?);
    let stride = second.checked_sub(first).filter(|stride| *stride > 0)?;
    let even = pes.windows(2).all(|pair| pair[1].checked_sub(pair[0]) == Some(stride));
    even.then_some((first as i32, stride as i32, pes.len() as i32))
}

fn too_many(shape: Shape, why: &str) -> Error {
    let what = format!("a team of NVSHMEM of the PEs {shape:?} (first, stride, number)");
    let most = "there are at most as many as NVSHMEM_MAX_TEAMS says, 32 by default";
    Error::unavailable(what, format!("{why}; {most}"))
}

#[cfg(test)]
mod tests {
    use super::shape;

    #[test]
    fn a_team_is_made_of_a_constant_stride() {
        assert_eq!(shape(&[0, 1, 2]), Some((0, 1, 3)));
        assert_eq!(shape(&[1, 3, 5]), Some((1, 2, 3)));
        assert_eq!(shape(&[0, 2, 3]), None);
        assert_eq!(shape(&[4]), None);
        assert_eq!(shape(&[]), None);
    }
}
