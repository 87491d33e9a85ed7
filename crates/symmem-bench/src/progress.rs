//! How far the measurement is: a bar on a terminal, a line each elsewhere.
//!
//! Nothing is drawn while ranks measure: the bar moves only when a rank has reported.

use std::io::{IsTerminal, Write, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What is shown on standard error.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Of `steps` steps, none done.
    pub(super) fn start(steps: usize) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar =
                ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message("starting the ranks");
            bar
        });
        Self { bar }
    }

    /// One step is done.
    pub(super) fn step(&mut self, what: &str, round: usize, rounds: usize) {
        let text = format!("{what}, round {round} of {rounds}");
        match &self.bar {
            Some(bar) => {
                bar.set_message(text);
                bar.inc(1);
            }
            // Fails where nobody reads, and then it does not matter.
            None => drop(writeln!(stderr(), "{text}")),
        }
    }

    /// Takes the bar away: what follows stands alone.
    pub(super) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
