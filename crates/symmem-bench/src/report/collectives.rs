//! The table of the collectives: one line for each size, with the floor and the best of the other systems.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::super::record::Record;
use super::super::settings::human;
use super::{Line, median, significant, unit};

const HEADER: [&str; 10] =
    ["collective", "type", "bytes", "ranks", "median", "p10", "p90", "unit", "floor", "× floor"];
const PEER_HEADER: [&str; 3] = ["best peer", "its median", "best peer / ours"];

/// One line of the table, for the pages that show it.
pub(in super::super) struct Entry<'a> {
    pub(in super::super) of: &'a Record,
    /// Microseconds.
    pub(in super::super) median: f64,
    pub(in super::super) p10: f64,
    pub(in super::super) p90: f64,
    pub(in super::super) floor: Option<Compared>,
    pub(in super::super) peer: Option<(&'a str, Compared)>,
}

/// Another system's time, and a ratio taken within rounds.
#[derive(Clone, Copy)]
pub(in super::super) struct Compared {
    pub(in super::super) median: f64,
    pub(in super::super) ratio: f64,
}

/// The library's lines, each with what it is compared with.
pub(in super::super) fn entries<'a>(
    lines: &'a [Line<'a>],
    records: &'a [Record],
) -> Vec<Entry<'a>> {
    let entry = |line: &'a Line<'a>| {
        let of = line.first().filter(|record| record.system == "symmem")?;
        let compare = |system: &str, invert: bool| {
            let of_rounds = |same_round: bool| -> Vec<_> {
                let pair = |r: &&Record| pair(r, system, records, same_round);
                line.rounds.iter().filter_map(pair).collect()
            };
            let within = of_rounds(true);
            // The host may have changed the conditions between the two in every round.
            let pairs = if within.is_empty() { of_rounds(false) } else { within };
            let ratio = |(ours, theirs): &(f64, f64)| {
                if invert { theirs / ours } else { ours / theirs }
            };
            Some(Compared {
                median: median(pairs.iter().map(|pair| pair.1).collect())?,
                ratio: median(pairs.iter().map(ratio).collect())?,
            })
        };
        let peers = records.iter().filter(|record| record.is_peer_of(of) && !record.is_own());
        let mut peers: Vec<_> = peers.map(|record| record.system.as_str()).collect();
        peers.sort_unstable();
        peers.dedup();
        let peers = peers.into_iter().filter_map(|name| Some((name, compare(name, true)?)));
        let peer = peers.min_by(|a, b| a.1.median.total_cmp(&b.1.median));
        // Of the other rows those that somebody else has too.
        (of.is_sized() || of.hosts.is_some() || peer.is_some()).then(|| Entry {
            of,
            median: line.over_rounds(|r| r.median_us),
            p10: line.over_rounds(|r| r.p10_us),
            p90: line.over_rounds(|r| r.p90_us),
            floor: compare(if of.hosts.is_some() { "sockets" } else { "limits" }, false),
            peer,
        })
    };
    lines.iter().filter_map(entry).collect()
}

/// This round's time and that of another system under the same conditions, in the same round or in any.
fn pair(of: &Record, system: &str, records: &[Record], same_round: bool) -> Option<(f64, f64)> {
    let alike = |r: &&Record| {
        r.system == system
            && r.is_peer_of(of)
            && (r.round == of.round || !same_round)
            && r.as_near == of.as_near
    };
    Some((of.median_us, records.iter().find(alike)?.median_us))
}

/// The table, or nothing if there are no collectives.
pub(super) fn text(lines: &[Line<'_>], records: &[Record]) -> String {
    let entries = entries(lines, records);
    if entries.is_empty() {
        return String::new();
    }
    let peers = records.iter().any(|record| !record.is_own());
    let mut table = Table::new();
    let floor =
        if records.iter().any(|record| record.hosts.is_some()) { "sockets" } else { "floor" };
    let times = format!("× {floor}");
    let own = HEADER.iter().map(|name| match *name {
        "floor" => floor,
        "× floor" => &times,
        name => name,
    });
    let header = own.chain(PEER_HEADER.into_iter().filter(|_| peers));
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header);
    table.set_content_arrangement(ContentArrangement::Disabled);
    for entry in &entries {
        let cells = cells(entry);
        let shown = if peers { cells.len() } else { HEADER.len() };
        table.add_row(cells.into_iter().take(shown));
    }
    for index in [2, 3, 4, 5, 6, 8, 9, 11, 12] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{table}\n")
}

/// The cells of one line, those about peers last; times in the unit of the line's own.
pub(in super::super) fn cells(entry: &Entry<'_>) -> Vec<String> {
    let (unit, scale) = unit(entry.median);
    let time = |us: f64| significant(us / scale);
    let dash = || "-".to_owned();
    let ratio = |compared: Compared| format!("{:.2}", compared.ratio);
    vec![
        entry.of.collective.clone(),
        entry.of.dtype.clone(),
        if entry.of.bytes > 0 && (entry.of.is_sized() || entry.of.hosts.is_some()) {
            human(entry.of.bytes)
        } else {
            dash()
        },
        entry.of.ranks.to_string(),
        time(entry.median),
        time(entry.p10),
        time(entry.p90),
        unit.to_owned(),
        entry.floor.map_or_else(dash, |floor| time(floor.median)),
        entry.floor.map_or_else(dash, ratio),
        entry.peer.map_or_else(dash, |(name, _)| name.to_owned()),
        entry.peer.map_or_else(dash, |(_, peer)| time(peer.median)),
        entry.peer.map_or_else(dash, |(_, peer)| ratio(peer)),
    ]
}

/// The names of the columns, with those about peers.
pub(in super::super) fn header() -> impl Iterator<Item = &'static str> {
    HEADER.into_iter().chain(PEER_HEADER)
}
