//! `docs/parity.md` holds every row of the behaviour list once, and every test it names exists.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::File;
use crate::tidy::rust::Source;

const PAGE: &str = "docs/parity.md";
/// Whether a row without a test yet is a finding.
const REJECT_PENDING: bool = true;
const PENDING: &str = "pending";

/// The rows: prefix, digits of the number, ranges of numbers.
type Rows = (&'static str, usize, &'static [(u32, u32)]);
#[rustfmt::skip]
const ROWS: &[Rows] = &[
    ("L", 2, &[(1, 8), (10, 16), (20, 36), (40, 58), (60, 63), (70, 76), (80, 85), (90, 95), (100, 103), (110, 114), (120, 140)]),
    ("H", 2, &[(1, 12), (20, 31), (40, 47), (60, 72)]),
    ("OP", 2, &[(1, 48)]),
    ("C", 1, &[(1, 12)]),
    ("PY", 2, &[(1, 24), (30, 32)]),
    ("N", 2, &[(1, 10)]),
    ("T", 3, &[(1, 100), (201, 227), (301, 315), (401, 407), (411, 448), (470, 471)]),
    ("D", 2, &[(1, 4), (10, 13)]),
    ("W", 2, &[(1, 35)]),
    ("PG", 2, &[(1, 23)]),
];
/// A row that was put between two others.
const EXTRA: &str = "L-139a";

struct Row<'a> {
    line: usize,
    id: &'a str,
    cells: Vec<&'a str>,
}

pub(super) fn check(files: &[File]) -> Vec<String> {
    let Some(page) = files.iter().find(|file| file.path == PAGE) else {
        return vec![format!("{PAGE} does not exist")];
    };
    let rows = rows(&page.text);
    let mut found = check_ids(&rows, &wanted());
    found.extend(rows.iter().flat_map(|row| check_row(row, files)));
    found.extend(pending(&rows).filter(|_| REJECT_PENDING));
    found
}

fn wanted() -> BTreeSet<String> {
    let expand = |(prefix, digits, ranges): &Rows| {
        let (prefix, digits) = (*prefix, *digits);
        let numbers = ranges.iter().flat_map(|&(first, last)| first..=last);
        numbers.map(move |number| format!("{prefix}-{number:0digits$}")).collect::<Vec<_>>()
    };
    ROWS.iter().flat_map(expand).chain([EXTRA.to_owned()]).collect()
}

/// The table rows whose first cell is an id.
fn rows(text: &str) -> Vec<Row<'_>> {
    let table = text.lines().enumerate().filter_map(|(number, line)| {
        let cells = line.trim().strip_prefix('|')?.strip_suffix('|')?;
        let cells: Vec<_> = cells.split('|').map(str::trim).collect();
        let (prefix, number_part) = cells.first()?.split_once('-')?;
        let known = ROWS.iter().any(|(name, _, _)| *name == prefix);
        let numbered = number_part.starts_with(|c: char| c.is_ascii_digit());
        (known && numbered).then(|| Row { line: number + 1, id: cells[0], cells: cells.clone() })
    });
    table.collect()
}

fn check_ids(rows: &[Row<'_>], wanted: &BTreeSet<String>) -> Vec<String> {
    let mut count: BTreeMap<&str, usize> = wanted.iter().map(|id| (id.as_str(), 0)).collect();
    let mut found = Vec::new();
    for row in rows {
        match count.get_mut(row.id) {
            Some(times) => *times += 1,
            None => found.push(format!("{PAGE}:{}: {} is not in the list", row.line, row.id)),
        }
    }
    let wrong = count.into_iter().filter(|(_, times)| *times != 1);
    found.extend(wrong.map(|(id, times)| format!("{PAGE}: {id} is there {times} times, not once")));
    found
}

fn check_row(row: &Row<'_>, files: &[File]) -> Vec<String> {
    let [_, what, status, proof] = row.cells.as_slice() else {
        return vec![format!("{PAGE}:{}: {} needs four columns", row.line, row.id)];
    };
    let mut found = Vec::new();
    let mut say = |what: &str| found.push(format!("{PAGE}:{}: {}: {what}", row.line, row.id));
    if what.is_empty() || proof.is_empty() {
        say("an empty cell");
    }
    let tests = tests(proof);
    match *status {
        "works" if tests.is_empty() && *proof != PENDING => say("works, but names no test"),
        "works" | "later" | "n/a" => {}
        _ => say("the status is works, later or n/a"),
    }
    for (path, name) in tests {
        if !has_test(files, path, name) {
            say(&format!("no fn {name} in {path}"));
        }
    }
    found
}

/// The tests that a cell names as `path.rs::name` or `path.py::name` in backticks.
fn tests(cell: &str) -> Vec<(&str, &str)> {
    let quoted = cell.split('`').skip(1).step_by(2);
    let split = |text: &'_ str| [".rs::", ".py::"].iter().find_map(|ending| text.find(ending));
    let named = quoted.filter_map(|text| split(text).map(|at| text.split_at(at + 3)));
    named.map(|(path, name)| (path, name.trim_start_matches("::"))).collect()
}

fn has_test(files: &[File], path: &str, name: &str) -> bool {
    let Some(file) = files.iter().find(|file| file.path == path) else { return false };
    let name = name.rsplit("::").next().unwrap_or(name);
    if path.ends_with(".py") {
        let definition = format!("def {name}(");
        return file.text.lines().any(|line| line.starts_with(&definition));
    }
    Source::new(&file.text).functions().iter().any(|(function, _)| *function == name)
}

fn pending(rows: &[Row<'_>]) -> Option<String> {
    let open = rows.iter().filter(|row| row.cells.last() == Some(&PENDING));
    let ids: Vec<_> = open.map(|row| row.id).collect();
    let list = ids.join(" ");
    (!ids.is_empty()).then(|| format!("{PAGE}: {} rows name no test yet: {list}", ids.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::file;

    #[test]
    fn the_list_has_its_rows() {
        let wanted = wanted();
        assert!(["L-01", "L-139a", "C-1", "T-001", "OP-48"].iter().all(|id| wanted.contains(*id)));
        assert!(["L-09", "H-50", "T-101"].iter().all(|id| !wanted.contains(*id)));
    }

    #[test]
    fn missing_double_and_unknown_rows_are_found() {
        let text = "| L-01 | a | works | pending |\n| L-01 | a | n/a | b |\n| L-99 | a | n/a | b |";
        let wanted = ["L-01", "L-02"].map(str::to_owned).into();
        let found = check_ids(&rows(text), &wanted);
        assert_eq!(found.len(), 3);
        assert!(found[0].contains("L-99 is not in the list"));
        assert!(found[1].contains("L-01 is there 2 times"));
        assert!(found[2].contains("L-02 is there 0 times"));
    }

    #[test]
    fn named_tests_must_exist() {
        let files = [
            file("crates/a/tests/b.rs", "#[test]\nfn c_works() {}"),
            file("crates/a/tests/b.py", "def test_c():\n    pass"),
        ];
        let findings = |line: &str| check_row(&rows(line)[0], &files);
        assert!(findings("| L-01 | a | works | `crates/a/tests/b.rs::c_works` |").is_empty());
        assert_eq!(findings("| L-01 | a | works | `crates/a/tests/b.rs::gone` |").len(), 1);
        assert_eq!(findings("| L-01 | a | works | `crates/a/tests/z.rs::c_works` |").len(), 1);
        assert!(findings("| L-01 | a | works | `crates/a/tests/b.py::test_c` |").is_empty());
        assert_eq!(findings("| L-01 | a | works | `crates/a/tests/b.py::test_d` |").len(), 1);
        assert_eq!(findings("| L-01 | a | works | surely |").len(), 1);
        assert_eq!(findings("| L-01 | a | maybe | b |").len(), 1);
        assert_eq!(findings("| L-01 | a | later |").len(), 1);
    }

    #[test]
    fn pending_rows_are_told_together() {
        let text = "| L-01 | a | works | pending |\n| L-02 | a | n/a | b |";
        let said = pending(&rows(text)).unwrap();
        assert!(said.ends_with("1 rows name no test yet: L-01"));
    }
}
