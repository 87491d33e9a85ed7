//! Which ranks are on one host: those with the same identity.

use crate::error::{Error, Result};

pub(super) const HOST: &str = "SYMMEM_HOST";
const LONGEST: usize = 64;

/// The identity of this host: `SYMMEM_HOST`, or the boot id. Host names repeat. Boot ids repeat where ranks run in network
/// namespaces of one machine, or in copies of one running machine.
pub fn identity() -> Result<String> {
    match std::env::var_os(HOST).filter(|set| !set.is_empty()) {
        Some(set) => checked(&set.to_string_lossy()),
        None => Ok(boot_id()),
    }
}

/// The ranks of a world by host. Hosts are numbered in the order of their first ranks.
pub(crate) struct Hosts {
    /// The host of each rank.
    of: Vec<usize>,
    names: Vec<String>,
}

impl Hosts {
    /// All of `size` ranks on this host.
    pub(super) fn one(size: usize) -> Self {
        Self { of: vec![0; size], names: vec![String::new()] }
    }

    /// By the identity of each rank's host.
    pub(super) fn new<'a>(identities: impl Iterator<Item = &'a str>) -> Self {
        let (mut of, mut names) = (Vec::new(), Vec::<String>::new());
        for identity in identities {
            let known = names.iter().position(|name| name == identity);
            of.push(known.unwrap_or(names.len()));
            if known.is_none() {
                names.push(identity.to_owned());
            }
        }
        Self { of, names }
    }

    pub(crate) fn count(&self) -> usize {
        self.names.len()
    }

    /// The number of the rank's host.
    pub(crate) fn number(&self, rank: usize) -> Option<usize> {
        self.of.get(rank).copied()
    }

    pub(crate) fn name(&self, rank: usize) -> &str {
        let name = self.number(rank).and_then(|number| self.names.get(number));
        name.map(String::as_str).unwrap_or_default()
    }

    /// Whether these two ranks are on one host.
    pub(crate) fn are_together(&self, a: usize, b: usize) -> bool {
        self.number(a).is_some_and(|host| self.number(b) == Some(host))
    }

    /// How many ranks are on the host of this one.
    pub(crate) fn ranks_beside(&self, rank: usize) -> usize {
        (0..self.of.len()).filter(|&other| self.are_together(rank, other)).count()
    }
}

fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim_end().to_owned()
}

fn checked(name: &str) -> Result<String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if name.len() <= LONGEST && name.chars().all(fits) {
        return Ok(name.to_owned());
    }
    let expected =
        format!("{HOST} to have at most {LONGEST} characters: letters, digits and any of -_.:");
    Err(Error::Usage { op: super::connect::OP, rank: None, expected, got: format!("{name:?}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_other_characters_or_too_many_is_refused_by_its_variable() {
        for name in ["node-7.rack_2", "fe80::1", &"h".repeat(LONGEST)] {
            assert_eq!(checked(name).unwrap(), name);
        }
        for name in ["two words", "a/b", "höst", "line\n", &"h".repeat(LONGEST + 1)] {
            let e = checked(name).unwrap_err().to_string();
            assert!(e.contains("SYMMEM_HOST") && e.contains("at most 64"), "{e}");
        }
    }

    #[test]
    fn hosts_are_numbered_by_their_first_ranks() {
        let hosts = Hosts::new(["b", "a", "b", "c"].into_iter());
        assert_eq!([0, 1, 2, 3].map(|rank| hosts.number(rank).unwrap()), [0, 1, 0, 2]);
        assert_eq!((hosts.count(), hosts.name(3), hosts.ranks_beside(0)), (3, "c", 2));
        assert!(hosts.are_together(0, 2) && !hosts.are_together(0, 1));
        assert!(!hosts.are_together(4, 4) && !hosts.are_together(0, 9));
    }

    #[test]
    fn without_a_name_it_is_the_boot_id() {
        assert_eq!(boot_id().len(), 36);
    }
}
