//! From nothing to the first barrier.

use std::time::Duration;

use super::{How, Measure, Measures, Row, Target};

pub(super) const ROW: Row = Row {
    name: "startup",
    about: "processes started, world joined, first barrier done",
    ranks: 16,
    how: How::FromOutside,
    on_slices: true,
    on_devices: false,
    measures: Measures::Fixed(&[Measure {
        collective: "startup",
        batch: 1,
        samples: super::super::startup::TIMES,
        target: Some(Target::Within(Duration::from_secs(2))),
        ..Measure::TINY
    }]),
};
