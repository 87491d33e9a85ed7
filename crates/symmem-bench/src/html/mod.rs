//! `--html`: one page that needs nothing else, with charts, tables, the machine and the command.

mod chart;

use std::collections::BTreeMap;
use std::fmt::Write;

use super::record::Record;
use super::report::collectives::{cells, entries, header};
use super::report::{lines, median};
use chart::{Chart, Series};

/// Colours follow the reader's setting for light or dark, and wide tables scroll on their own.
const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #d8dee4; --soft: #59636e;
  --c0: #0b62d6; --c1: #8a8f98; --c2: #c2410c; --c3: #15803d; --c4: #7e22ce; --c5: #a16207; --c6: #be185d;
  --c7: #0e7490; --c8: #4d7c0f; --c9: #7f1d1d; --c10: #e11d48; --c11: #3730a3; --c12: #78533a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #30363d; --soft: #9198a1;
  --c0: #58a6ff; --c1: #8b949e; --c2: #ff9b5e; --c3: #4cc66d; --c4: #c297ff; --c5: #e3b341; --c6: #ff7eb6;
  --c7: #39c5cf; --c8: #b5d46a; --c9: #c96a6a; --c10: #ff5d7a; --c11: #8f8cff; --c12: #c9a58a; } }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--faint); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
code { overflow-wrap: anywhere; } .keys { display: flex; flex-wrap: wrap; gap: 0 1rem; } .soft { color: var(--soft); }
";

/// The page.
pub(super) fn page(records: &[Record], command: &str, machine: &[(&str, String)]) -> String {
    let mut body = String::from("<h1>symmem bench</h1>\n");
    body += &format!("<p><code>{}</code></p>\n<h2 id=\"machine\">Machine</h2>\n", escape(command));
    body += &table(
        ["what", "here"],
        machine.iter().map(|(what, here)| [(*what).to_owned(), here.clone()]),
    );
    body += &charts(records);
    let lines = lines(records);
    let rows = entries(&lines, records);
    body += "<h2 id=\"table\">Collectives</h2>\n";
    body += &table(header(), rows.iter().map(cells));
    body += "<h2 id=\"all\">All figures</h2>\n<p class=\"soft\">Medians over the rounds, in microseconds.</p>\n";
    let all = lines.iter().filter_map(|line| {
        let of = line.first()?;
        let time = |figure| format!("{:.3}", line.over_rounds(figure));
        let ranks = of.ranks.to_string();
        Some([of.title(), ranks, time(|r| r.median_us), time(|r| r.p10_us), time(|r| r.p90_us)])
    });
    body += &table(["what", "ranks", "median", "p10", "p90"], all);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>symmem bench</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
}

/// For each collective the time and the bandwidth over the size, of all systems.
fn charts(records: &[Record]) -> String {
    let mut text = String::new();
    let mut kinds: Vec<(&str, usize, &str)> = Vec::new();
    for record in records.iter().filter(|record| record.is_sized()) {
        let kind = (record.collective.as_str(), record.ranks, record.dtype.as_str());
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let mut systems: Vec<_> = records.iter().filter(|r| r.is_sized()).map(place).collect();
    systems.sort_unstable();
    systems.dedup();
    for (collective, ranks, dtype) in kinds {
        let of = |record: &&Record| {
            (record.collective.as_str(), record.ranks, record.dtype.as_str())
                == (collective, ranks, dtype)
        };
        let times = series(records.iter().filter(of), &systems);
        let name = format!("{collective} of {dtype}, {ranks} ranks");
        let _ =
            writeln!(text, "<h2>{}</h2>\n<p class=\"keys\">{}</p>", escape(&name), legend(&times));
        let bandwidth = times.iter().map(|s| Series {
            points: s.points.iter().map(|&(bytes, us)| (bytes, bytes / us / 1e3)).collect(),
            ..s.clone()
        });
        let bandwidth: Vec<_> = bandwidth.collect();
        text += "<div class=\"charts\">\n";
        text += &Chart { title: &format!("{name}: time"), unit: "µs", series: &times }.svg();
        text +=
            &Chart { title: &format!("{name}: bandwidth"), unit: "GB/s", series: &bandwidth }.svg();
        text += "</div>\n";
    }
    text
}

/// Ours first, then the floor, then the others.
fn place(record: &Record) -> (u8, &str) {
    let place = match record.system.as_str() {
        "symmem" => 0,
        "limits" => 1,
        _ => 2,
    };
    (place, &record.system)
}

/// One for each system, in the same colour in every chart of the page.
fn series<'a>(records: impl Iterator<Item = &'a Record>, systems: &[(u8, &str)]) -> Vec<Series> {
    let mut found = BTreeMap::<(u8, &str), BTreeMap<usize, Vec<f64>>>::new();
    for record in records {
        let sizes = found.entry(place(record)).or_default();
        sizes.entry(record.bytes).or_default().push(record.median_us);
    }
    let one = |(system, sizes): ((u8, &str), BTreeMap<_, _>)| {
        let point = |(bytes, times): (usize, Vec<f64>)| Some((bytes as f64, median(times)?));
        let floor = system.0 == 1;
        let name = if floor { "floor" } else { system.1 }.to_owned();
        let colour = systems.iter().position(|other| *other == system).unwrap_or(0);
        Series { name, floor, colour, points: sizes.into_iter().filter_map(point).collect() }
    };
    found.into_iter().map(one).collect()
}

fn legend(series: &[Series]) -> String {
    let key = |s: &Series| {
        format!("<span><span style=\"color:{}\">●</span> {}</span>", s.paint(), escape(&s.name))
    };
    series.iter().map(key).collect()
}

fn table<H, R>(header: H, rows: impl IntoIterator<Item = R>) -> String
where
    H: IntoIterator<Item = &'static str>,
    R: IntoIterator<Item = String>,
{
    let head: String =
        header.into_iter().map(|name| format!("<th>{}</th>", escape(name))).collect();
    let mut text =
        format!("<div class=\"scroll\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n");
    for row in rows {
        let cells: String =
            row.into_iter().map(|cell| format!("<td>{}</td>", escape(&cell))).collect();
        let _ = writeln!(text, "<tr>{cells}</tr>");
    }
    text + "</tbody></table></div>\n"
}

/// Text as a page may contain it.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Of what the kernel gives as `24684100 kB`.
fn gibibytes(text: &str) -> String {
    let number = text.strip_suffix(" kB").and_then(|number| number.parse::<f64>().ok());
    number.map_or_else(|| text.to_owned(), |number| format!("{:.1} GiB", number / 1048576.0))
}

/// What the figures depend on, as far as the system tells.
pub(super) fn machine() -> Vec<(&'static str, String)> {
    let file = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim());
        value.unwrap_or("unknown").to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let load = file("/proc/loadavg");
    vec![
        ("processor", field(&file("/proc/cpuinfo"), "model name")),
        ("cores", cores.to_string()),
        ("memory", gibibytes(&field(&file("/proc/meminfo"), "MemTotal"))),
        ("kernel", file("/proc/sys/kernel/osrelease").trim().to_owned()),
        ("load at the end", load.split(' ').take(3).collect::<Vec<_>>().join(" ")),
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_for_people() {
        assert_eq!(gibibytes("24684100 kB"), "23.5 GiB");
        assert_eq!(gibibytes("unknown"), "unknown");
    }

    #[test]
    fn text_cannot_become_markup() {
        let page = page(&[], "bench --json <a&b>", &[("load", "\"1\"".to_owned())]);
        assert!(page.contains("bench --json &lt;a&amp;b&gt;") && page.contains("&quot;1&quot;"));
    }
}
