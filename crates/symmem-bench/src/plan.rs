//! Which rows are measured, by how many ranks, and what goes together into one job.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::ROWS;
use super::rows::{How, Row, between};
use super::settings::{Backend, Memory, Settings};
use super::startup;

/// What one call of `symmem bench` does.
#[derive(Debug)]
pub(super) struct Plan {
    rows: Vec<&'static Row>,
    /// Rows that were asked for and have no form on slices, or on devices.
    skipped: Vec<&'static str>,
    ranks: Option<usize>,
    pub(super) rounds: usize,
    settings: Settings,
}

impl Plan {
    /// The named rows (all, if none is), and the floors that they are compared with.
    pub(super) fn new(
        names: &[String],
        ranks: Option<usize>,
        rounds: usize,
        settings: &Settings,
    ) -> Result<Self> {
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
            named(row.name) || row.fixed().iter().any(|m| floors.contains(&m.collective))
        };
        let on_devices = settings.backend == Backend::Cuda;
        let hosts = settings.hosts.is_some();
        let can = |row: &&Row| {
            if hosts || row.name == between::PUT.name {
                return hosts && between::has(row.name);
            }
            (row.on_slices || settings.memory == Memory::Symmetric)
                && (row.on_devices || !on_devices)
        };
        // What nobody asked for by name is not missed where it makes no sense.
        let missed = |row: &Row| {
            if hosts || row.name == between::PUT.name {
                names.iter().any(|n| n == row.name)
            } else {
                named(row.name)
            }
        };
        let skipped = ROWS.iter().filter(|row| missed(row) && !can(row)).map(|row| row.name);
        let skipped: Vec<_> = skipped.collect();
        if !names.is_empty() && names.iter().all(|name| skipped.contains(&name.as_str())) {
            bail!("no row is left: {} there is no {}", place(settings), skipped.join(", "));
        }
        let rows = ROWS.iter().filter(wanted).filter(can).collect();
        Ok(Self { rows, skipped, ranks, rounds, settings: settings.clone() })
    }

    /// What has to be said about it, for the end of the report.
    pub(super) fn text(&self) -> String {
        match self.skipped.as_slice() {
            [] => String::new(),
            rows => {
                let place = place(&self.settings);
                format!("skipped, since they have no form {place}: {}\n", rows.join(", "))
            }
        }
    }

    fn ranks(&self, row: &Row) -> usize {
        self.ranks.unwrap_or(self.settings.hosts.map_or(row.ranks, usize::from))
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
        // Threads are not started by a launcher.
        let processes = self.settings.backend == Backend::Host;
        let outside = |row: &&&Row| processes && row.how == How::FromOutside;
        self.rows.iter().find(outside).map(|row| self.ranks(row))
    }

    /// How many steps there will be with so many peers, for the progress bar.
    pub(super) fn steps(&self, peers: usize) -> usize {
        let inside = self.rows.iter().filter(|row| row.how == How::InRanks);
        let measures = inside.flat_map(|row| row.measures(&self.settings));
        let figures: usize = measures.map(|measure| 1 + usize::from(measure.read)).sum();
        (figures + peers) * self.rounds + self.startup().map_or(0, |_| startup::TIMES)
    }
}

/// Where rows may have no form.
fn place(settings: &Settings) -> &'static str {
    match settings {
        Settings { hosts: Some(_), .. } => "between hosts",
        Settings { backend: Backend::Cuda, .. } => "on devices",
        Settings { memory: Memory::Slices, .. } => "on slices",
        _ => "without --hosts",
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Parsed {
        #[command(flatten)]
        settings: Settings,
    }

    fn settings() -> Settings {
        Parsed::parse_from(["bench"]).settings
    }

    #[test]
    fn rows_without_a_form_on_slices_are_skipped_and_named() {
        let settings = Parsed::parse_from(["bench", "--memory", "slices"]).settings;
        let plan = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(ToString::to_string).collect();
            Plan::new(&names, None, 1, &settings)
        };
        let both = plan(&["broadcast", "gather"]).unwrap();
        assert_eq!(both.jobs()[&2], ["broadcast"]);
        assert!(both.text().contains("slices: gather"), "{}", both.text());
        assert!(plan(&["gather"]).unwrap_err().to_string().contains("no gather"));
        assert!(plan(&["broadcast"]).unwrap().text().is_empty());
    }

    fn jobs(names: &[&str], ranks: Option<usize>) -> Vec<(usize, Vec<&'static str>)> {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        Plan::new(&names, ranks, 3, &settings()).unwrap().jobs().into_iter().collect()
    }

    #[test]
    fn a_row_brings_its_floor_along() {
        assert_eq!(jobs(&["barrier"], None), [(2, vec!["floor", "barrier"])]);
        assert_eq!(jobs(&["rendezvous"], None), [(4, vec!["rendezvous"])]);
    }

    #[test]
    fn rows_of_as_many_ranks_share_their_processes() {
        assert_eq!(jobs(&[], None).len(), 2);
        let all = jobs(&[], Some(4));
        assert_eq!(all.len(), 1);
        assert!(all[0].0 == 4 && all[0].1.contains(&"rendezvous") && all[0].1.contains(&"barrier"));
    }

    #[test]
    fn an_unknown_row_is_answered_with_those_there_are() {
        let error = Plan::new(&["barier".to_owned()], None, 3, &settings()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("\"barier\"") && error.contains("barrier, put_signal"), "{error}");
    }
}
