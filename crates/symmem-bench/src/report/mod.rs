//! The tables at the end.

pub(super) mod collectives;

use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::record::Record;
use super::rows::{self, Measure, Target};

const HEADER: [&str; 10] =
    ["what", "ranks", "samples", "median", "p10", "p90", "unit", "× floor", "target", "met"];

/// The table, and what has to be said about it.
pub(super) fn text(records: &[Record]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(HEADER);
    table.set_content_arrangement(ContentArrangement::Disabled);
    let (sized, fixed): (Vec<_>, Vec<_>) =
        lines(records).into_iter().partition(|line| line.is_sized());
    for line in &fixed {
        table.add_row(line.cells(records));
    }
    for index in 1..=5 {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text = if fixed.is_empty() { String::new() } else { format!("{table}\n") };
    text += &collectives::text(&[fixed, sized].concat(), records);
    let near = records.iter().filter(|record| record.as_near).count();
    if near > 0 {
        let all = records.len();
        text += &format!(
            "{near} of {all} figures were taken while the two cores were near each other; "
        );
        text += "rows that have others leave them out\n";
    }
    text
}

/// All rounds of one measure.
#[derive(Clone)]
pub(super) struct Line<'a> {
    measure: Option<&'static Measure>,
    pub(super) rounds: Vec<&'a Record>,
}

pub(super) fn lines(records: &[Record]) -> Vec<Line<'_>> {
    let mut lines: Vec<Line<'_>> = Vec::new();
    for record in records {
        match lines.iter_mut().find(|line| line.rounds.first().is_some_and(|r| r.is_same(record))) {
            Some(line) => line.rounds.push(record),
            None => lines
                .push(Line { measure: rows::measure(&record.collective), rounds: vec![record] }),
        }
    }
    lines.iter_mut().for_each(Line::leave_out_near);
    lines
}

impl Line<'_> {
    /// Between near cores a flag travels several times as fast: such rounds say nothing about others.
    fn leave_out_near(&mut self) {
        if self.rounds.iter().any(|record| !record.as_near) {
            self.rounds.retain(|record| !record.as_near);
        }
    }

    /// What all rounds are of.
    pub(super) fn first(&self) -> Option<&Record> {
        self.rounds.first().copied()
    }

    fn is_sized(&self) -> bool {
        self.first().is_some_and(|r| r.is_sized() || !r.is_own() || r.hosts.is_some())
    }

    /// The median over the rounds of one of their figures.
    pub(super) fn over_rounds(&self, figure: fn(&Record) -> f64) -> f64 {
        median(self.rounds.iter().map(|record| figure(record)).collect()).unwrap_or(f64::NAN)
    }

    fn cells(&self, records: &[Record]) -> Vec<String> {
        let Some(first) = self.rounds.first() else { return Vec::new() };
        let median_us = self.over_rounds(|r| r.median_us);
        let (unit, scale) = unit(median_us);
        let time = |us: f64| significant(us / scale);
        let ratio = self.times_floor(records);
        let (target, met) = self.verdict(median_us, ratio);
        let samples: usize = self.rounds.iter().map(|record| record.samples).sum();
        vec![
            first.title(),
            first.ranks.to_string(),
            samples.to_string(),
            time(median_us),
            time(self.over_rounds(|r| r.p10_us)),
            time(self.over_rounds(|r| r.p90_us)),
            unit.to_owned(),
            ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            target,
            met,
        ]
    }

    /// The median over the rounds of the ratio within each, of rounds in which both ran under the same conditions.
    fn times_floor(&self, records: &[Record]) -> Option<f64> {
        let floor = self.measure?.floor?;
        let ratio = |of: &&Record| {
            let alike = |r: &&Record| {
                r.collective == floor
                    && r.system == "limits"
                    && (r.ranks, r.round, r.as_near) == (of.ranks, of.round, of.as_near)
            };
            Some(of.median_us / records.iter().find(alike)?.median_us)
        };
        median(self.rounds.iter().filter_map(ratio).collect())
    }

    fn verdict(&self, median_us: f64, ratio: Option<f64>) -> (String, String) {
        let none = || ("-".to_owned(), "-".to_owned());
        let Some(measure) = self.measure else { return none() };
        // A target is for so many ranks, and for cores.
        let held = |record: &&Record| record.ranks == rows::ranks_of(measure) && !record.as_near;
        if !self.rounds.first().is_some_and(held) {
            return none();
        }
        let (text, met) = match (measure.target, ratio) {
            (Some(Target::TimesFloor(most)), Some(ratio)) => (format!("≤ {most} ×"), ratio <= most),
            (Some(Target::Within(most)), _) => {
                (format!("< {most:?}"), Duration::from_secs_f64(median_us / 1e6) < most)
            }
            _ => return none(),
        };
        (text, if met { "yes" } else { "no" }.to_owned())
    }
}

pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// The unit for a figure of so many microseconds, and how many of these it has.
pub(super) fn unit(us: f64) -> (&'static str, f64) {
    match us {
        us if us < 1e3 => ("µs", 1.0),
        us if us < 1e6 => ("ms", 1e3),
        _ => ("s", 1e6),
    }
}

/// Three digits, or all before the point.
pub(super) fn significant(value: f64) -> String {
    let digits = if value < 10.0 { 3 } else { 4 - value.log10().ceil().clamp(0.0, 4.0) as usize };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::super::record::Sample;
    use super::*;

    fn record(collective: &str, round: usize, us: f64) -> Record {
        let samples = [Sample { ns: us * 1e3, as_near: false }; 9];
        Record::new(rows::measure(collective).unwrap(), 2, round, &samples, true)
    }

    #[test]
    fn the_ratio_is_taken_within_a_round() {
        let mut records = Vec::new();
        for (round, slow) in [(1, 1.0), (2, 3.0), (3, 1.0)] {
            records.push(record("flag_exchange", round, 0.1 * slow));
            records.push(record("barrier", round, 0.11 * slow));
        }
        let lines = lines(&records);
        assert_eq!(lines.len(), 2);
        let cells = lines[1].cells(&records);
        assert_eq!(cells[7..], ["1.10", "≤ 1.15 ×", "yes"]);
        assert_eq!((cells[2].as_str(), cells[3].as_str()), ("27", "0.110"));
    }

    #[test]
    fn rounds_under_different_conditions_are_not_compared() {
        let mut floor = record("flag_exchange", 1, 0.02);
        floor.as_near = true;
        let records = [floor, record("barrier", 1, 0.2)];
        assert_eq!(lines(&records)[1].cells(&records)[7..], ["-", "-", "-"]);
    }

    #[test]
    fn figures_have_three_digits_and_a_fitting_unit() {
        assert_eq!(significant(0.1234), "0.123");
        assert_eq!(significant(12.34), "12.34");
        assert_eq!(significant(1234.5), "1234");
        assert_eq!(unit(0.2).0, "µs");
        assert_eq!(unit(2e6), ("s", 1e6));
    }
}
