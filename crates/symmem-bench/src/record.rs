//! One figure of one round: what ranks report to the launcher and what `--json` writes.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::rows::{self, Measure};
use super::settings::human;

/// One line of JSON. The same for this library, for the machine's limits and for other systems.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    /// `symmem`, or `limits` for what the machine itself allows, `sockets` for what its network does.
    pub(super) system: String,
    pub(super) collective: String,
    pub(super) ranks: usize,
    pub(super) bytes: usize,
    pub(super) dtype: String,
    pub(super) backend: String,
    /// Where the input lies: `symmetric`, `slices` for private memory, `-` where there is none.
    pub(super) memory: String,
    pub(super) algorithm: String,
    /// How many the figures are of; a sample of a tiny call is the mean of several in a row.
    pub(super) samples: usize,
    pub(super) median_us: f64,
    pub(super) p10_us: f64,
    pub(super) p90_us: f64,
    /// Whether every result was right.
    pub(super) verified: bool,
    /// The fraction of all samples that were taken while two cores were the two threads of one.
    pub(super) near: f64,
    /// Whether there were hardly any others, so that the figures are of these.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) as_near: bool,
    /// Of calls on devices: whether they were replayed from a graph.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) graph: bool,
    /// Of calls on devices that were not: how long rank 0 took to make one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) host_us: Option<f64>,
    /// Between how many hosts, if several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) hosts: Option<usize>,
    /// What these hosts are: `namespaces` or `loopback`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) network: Option<String>,
    /// What passes between them each way, if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rate: Option<String>,
    /// Counted from 1.
    pub(super) round: usize,
}

/// What was timed, and in what conditions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) ns: f64,
    pub(super) as_near: bool,
}

impl Record {
    /// Sums up samples. Those taken as near are left out, unless there is hardly anything else.
    pub(super) fn new(
        measure: &Measure,
        ranks: usize,
        round: usize,
        samples: &[Sample],
        verified: bool,
    ) -> Self {
        let (near, apart): (Vec<Sample>, Vec<Sample>) = samples.iter().partition(|s| s.as_near);
        let as_near = apart.len() < 5 && near.len() > apart.len();
        let mut times: Vec<_> = if as_near { &near } else { &apart }.iter().map(|s| s.ns).collect();
        times.sort_by(f64::total_cmp);
        let at = |tenths: usize| {
            let ns = times.get(times.len() * tenths / 10).copied().unwrap_or(f64::NAN);
            (ns * 10.0).round() / 1e4 // to a tenth of a nanosecond
        };
        Self {
            system: measure.system.to_owned(),
            collective: measure.collective.to_owned(),
            ranks,
            bytes: measure.bytes,
            dtype: measure.dtype.to_owned(),
            backend: "host".to_owned(),
            memory: measure.memory.to_owned(),
            algorithm: measure.algorithm.to_owned(),
            samples: times.len(),
            median_us: at(5),
            p10_us: at(1),
            p90_us: at(9),
            verified,
            near: near.len() as f64 / samples.len().max(1) as f64,
            as_near,
            graph: measure.on.is_some_and(|on| on.graph),
            host_us: None,
            hosts: None,
            network: None,
            rate: None,
            round,
        }
    }

    /// Says between which hosts it was taken.
    pub(super) fn between(&mut self, hosts: usize, namespaces: bool, rate: Option<&str>) {
        self.hosts = Some(hosts);
        self.network = Some(if namespaces { "namespaces" } else { "loopback" }.to_owned());
        self.rate = rate.map(str::to_owned);
    }

    /// What it is, for people.
    pub(super) fn title(&self) -> String {
        let mut words = self.collective.replace('_', " ");
        let has_sizes = self.hosts.is_some() || rows::has_sizes(&self.collective);
        if has_sizes && !self.is_sized() && self.bytes > 0 {
            words += &format!(" {}", human(self.bytes));
        }
        if self.is_sized() {
            words += &format!(" {} {}", self.dtype, human(self.bytes));
        }
        match self.system.as_str() {
            "symmem" => words,
            "limits" => format!("floor: {words}"),
            other => format!("{other}: {words}"),
        }
    }

    /// Whether it is one of a collective over sizes.
    pub(super) fn is_sized(&self) -> bool {
        self.dtype != "-"
    }

    /// Whether it is ours or the floor's, rather than another system's.
    pub(super) fn is_own(&self) -> bool {
        self.system == "symmem" || self.is_floor()
    }

    /// Whether it is what ours is compared with.
    pub(super) fn is_floor(&self) -> bool {
        matches!(self.system.as_str(), "limits" | "sockets")
    }

    /// Whether it is another round of the same.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.system == other.system && self.algorithm == other.algorithm && self.is_peer_of(other)
    }

    /// Whether it is the same work, by whatever system.
    pub(super) fn is_peer_of(&self, other: &Self) -> bool {
        (self.ranks, self.bytes) == (other.ranks, other.bytes)
            && self.collective == other.collective
            && self.dtype == other.dtype
    }

    /// The line of JSON, with its end.
    pub(super) fn line(&self) -> Result<String> {
        Ok(serde_json::to_string(self)? + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::super::ROWS;
    use super::*;

    fn record(samples: &[(f64, bool)]) -> Record {
        let samples: Vec<_> = samples.iter().map(|&(ns, as_near)| Sample { ns, as_near }).collect();
        Record::new(&ROWS[0].fixed()[0], 2, 1, &samples, true)
    }

    #[test]
    fn samples_taken_near_are_kept_apart() {
        let mut samples = vec![(200.0, false); 8];
        samples.extend([(20.0, true); 2]);
        let record = record(&samples);
        assert_eq!((record.samples, record.median_us, record.near), (8, 0.2, 0.2));
        assert!(!record.as_near);
    }

    #[test]
    fn near_all_the_time_is_reported_as_such() {
        let record = record(&[(20.0, true), (20.0, true), (200.0, false)]);
        assert!(record.as_near);
        assert_eq!(record.median_us, 0.02);
    }

    #[test]
    fn a_line_of_json_is_read_back() {
        let record = record(&[(123.4, false)]);
        let line = record.line().unwrap();
        assert!(line.ends_with("}\n"));
        assert_eq!(serde_json::from_str::<Record>(&line).unwrap(), record);
    }
}
