//! The page of `symmem bench --html` in a browser without a window. Skipped where there is no Chromium.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The browser, where there is one.
fn chromium() -> Option<&'static str> {
    let answers = |name: &&str| {
        let output = Command::new(name).arg("--version").stdin(Stdio::null()).output();
        output.is_ok_and(|output| output.status.success())
    };
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(answers)
}

fn open(browser: &str, page: &Path, directory: &Path) -> Output {
    let profile = format!("--user-data-dir={}", directory.join("profile").display());
    let mut command = Command::new(browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]);
    command.args(["--v=0", "--dump-dom", &profile, &format!("file://{}", page.display())]);
    command.stdin(Stdio::null()).output().unwrap()
}

/// What the page said on the browser's console, and what it asked for and did not get.
fn complaints(log: &str) -> Vec<&str> {
    log.lines().filter(|line| line.contains(":CONSOLE")).collect()
}

fn directory(test: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("symmem-page-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn a_line_of_the_console_is_a_complaint_and_others_are_not() {
    let log = "[1:1:1115/1.2:ERROR:dbus/bus.cc:408] Failed to connect to the bus\n\
               [1:1:1115/1.2:INFO:CONSOLE:5] \"Uncaught ReferenceError\", source: file:///a (5)\n\
               [1:1:1115/1.2:INFO:CONSOLE(7)] \"a warning\", source: file:///a (7)\n";
    assert_eq!(complaints(log).len(), 2);
    assert!(complaints("").is_empty());
}

#[test]
fn a_page_with_an_error_is_found_out() {
    let Some(browser) = chromium() else { return println!("skipped: no chromium") };
    let directory = directory("wrong");
    let page = directory.join("page.html");
    std::fs::write(&page, "<!doctype html><script>console.error('wrong')</script>").unwrap();
    let output = open(browser, &page, &directory);
    std::fs::remove_dir_all(&directory).unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(complaints(&log).iter().any(|line| line.contains("wrong")), "{log}");
}

#[test]
fn a_browser_shows_charts_and_tables_and_has_no_complaint() {
    let Some(browser) = chromium() else { return println!("skipped: no chromium") };
    let directory = directory("right");
    let page = directory.join("page.html");
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    command.args(["bench", "all_reduce", "gather", "--bytes", "8,1K,16K", "--dtype", "f32,bf16"]);
    command.args(["--quick", "--rounds", "1", "--html", page.to_str().unwrap()]);
    assert!(command.stdin(Stdio::null()).output().unwrap().status.success());
    let output = open(browser, &page, &directory);
    std::fs::remove_dir_all(&directory).unwrap();
    let (dom, log) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{log}");
    assert!(complaints(&log).is_empty(), "{log}");

    // Two collectives of two types, without the reading of the result and with it: a time and a bandwidth each.
    let charts: Vec<_> = dom.split("<svg").skip(1).collect();
    assert_eq!(charts.len(), 16);
    for chart in charts {
        let chart = chart.split("</svg>").next().unwrap();
        let curves: Vec<_> = chart.split("<polyline").skip(1).collect();
        let points = curves[0].split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        let points: Vec<_> = points.split([' ', ',']).map(str::parse::<f64>).collect();
        assert!(!points.is_empty() && points.iter().all(Result::is_ok), "{chart}");
        assert!(curves.len() == 2 && chart.matches("<circle").count() >= 2, "{chart}");
    }
    for table in dom.split("<table").skip(1) {
        assert!(table.split("</table>").next().unwrap().matches("<tr>").count() > 2, "{table}");
    }
    assert_eq!(dom.matches("<table").count(), 3);
}
