//! Which rows are measured, by how many ranks, and what goes together into one job.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::ROWS;
use super::rows::{How, Row};
use super::startup;

/// What one call of `symmem bench` does.
#[derive(Debug)]
pub(super) struct Plan {
    rows: Vec<&'static Row>,
    ranks: Option<usize>,
    pub(super) rounds: usize,
}

impl Plan {
    /// The named rows (all, if none is), and the floors that they are compared with.
    pub(super) fn new(names: &[String], ranks: Option<usize>, rounds: usize) -> Result<Self> {
        for name in names {
            if !ROWS.iter().any(|row| row.name == name) {
                let known: Vec<_> = ROWS.iter().map(|row| row.name).collect();
                bail!("there is no row {name:?}; the rows are {}", known.join(", "));
            }
        }
        let named = |name: &str| names.is_empty() || names.iter().any(|n| n == name);
        let floors: Vec<_> =
            ROWS.iter().filter(|row| named(row.name)).flat_map(Row::floors).collect();
        let wanted = |row: &&Row| {
            named(row.name) || row.measures.iter().any(|m| floors.contains(&m.collective))
        };
        Ok(Self { rows: ROWS.iter().filter(wanted).collect(), ranks, rounds })
    }

    fn ranks(&self, row: &Row) -> usize {
        self.ranks.unwrap_or(row.ranks)
    }

    /// Rows of as many ranks share their processes; fewest ranks first.
    pub(super) fn jobs(&self) -> BTreeMap<usize, Vec<&'static str>> {
        let mut jobs = BTreeMap::<_, Vec<_>>::new();
        for row in self.rows.iter().filter(|row| row.how == How::InRanks) {
            jobs.entry(self.ranks(row)).or_default().push(row.name);
        }
        jobs
    }

    /// How many ranks to start over and over, if that is asked for.
    pub(super) fn startup(&self) -> Option<usize> {
        self.rows.iter().find(|row| row.how == How::FromOutside).map(|row| self.ranks(row))
    }

    /// How many records there will be, for the progress bar.
    pub(super) fn steps(&self) -> usize {
        let inside = self.rows.iter().filter(|row| row.how == How::InRanks);
        let inside: usize = inside.map(|row| row.measures.len() * self.rounds).sum();
        inside + self.startup().map_or(0, |_| startup::TIMES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(names: &[&str], ranks: Option<usize>) -> Vec<(usize, Vec<&'static str>)> {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        Plan::new(&names, ranks, 3).unwrap().jobs().into_iter().collect()
    }

    #[test]
    fn a_row_brings_its_floor_along() {
        assert_eq!(jobs(&["barrier"], None), [(2, vec!["floor", "barrier"])]);
        assert_eq!(jobs(&["rendezvous"], None), [(4, vec!["rendezvous"])]);
    }

    #[test]
    fn rows_of_as_many_ranks_share_their_processes() {
        assert_eq!(jobs(&[], None).len(), 2);
        assert_eq!(jobs(&[], Some(4)), [(4, vec!["floor", "barrier", "put_signal", "rendezvous"])]);
    }

    #[test]
    fn an_unknown_row_is_answered_with_those_there_are() {
        let error = Plan::new(&["barier".to_owned()], None, 3).unwrap_err().to_string();
        assert!(error.contains("\"barier\"") && error.contains("barrier, put_signal"), "{error}");
    }
}
